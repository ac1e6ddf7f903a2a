"""What other people's models need: their rules, a first guess at rules, the factors they hold."""
