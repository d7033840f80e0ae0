"""The process border: requests and replies, and the processes that answer them."""
