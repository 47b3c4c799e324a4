"""The page that compares the paper's claims with the records of all studies."""
