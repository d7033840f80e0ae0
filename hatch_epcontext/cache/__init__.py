"""What earlier builds kept: in the user's folder, and in a cache that machines share."""
