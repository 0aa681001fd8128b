"""The `blend` command and the engines that run a federation."""
