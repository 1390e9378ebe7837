"""What makes models faster on a CPU; none of it changes what they compute beyond rounding."""
