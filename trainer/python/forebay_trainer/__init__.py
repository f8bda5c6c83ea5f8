"""The reference trainer of Forebay, as the program `forebay-trainer`. It uses the libtorch of the installed `torch`."""
