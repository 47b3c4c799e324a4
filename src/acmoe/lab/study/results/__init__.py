"""The records of a study, their statistics, and the tables, figures and pages made of them."""
