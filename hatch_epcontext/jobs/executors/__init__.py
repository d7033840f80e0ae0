"""Where jobs run: in local workers, or on other machines."""
