"""What is known of values: which are constant, and which ones an input takes."""
