"""What is read from a module tree and its code: which parameters are units, who writes them."""
