"""The actions of workers: one module for each request, with the function ``handle`` that answers it."""
