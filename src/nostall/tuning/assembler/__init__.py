"""Search of what ptxas is given: order of PTX instructions, options, budgets and versions."""
