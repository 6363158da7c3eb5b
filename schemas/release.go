package schemas

// Release is the version that is made next, or that was made of this commit, of programs and clients alike: they have
// it from here, and 'make release' refuses another.
const Release = "0.1.0"
