"""The matrix of results: what is measured in the lab, and the pages made of it."""
