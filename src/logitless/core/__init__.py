"""From the public calls to the backends: arguments, the decision, the problem, statistics and custom gradients."""
