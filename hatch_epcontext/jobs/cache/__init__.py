"""What earlier builds compiled: a folder of this machine, and one that machines share."""
