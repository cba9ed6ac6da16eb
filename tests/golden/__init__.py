"""Golden traces: recorded metrics of short runs, one for each estimator."""
