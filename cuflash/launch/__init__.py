"""How a plan runs: argument structs, recipes, and the launcher."""
