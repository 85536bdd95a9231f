// MSL includes it: nothing of it is used.
