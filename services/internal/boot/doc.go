// Package boot is what every main of the project shares: configuration, logging,
// signals, the health endpoint, the NATS connection's settings and the exit status.
// A Service is one program; Main runs it from its command line to its exit status.
//
// A configuration is one struct per program, whose value is the default and whose fields have tags (schemas.Field).
// Package fields takes the settings, in rising order of precedence, from a YAML file (--config), the environment
// (MEANDER_<PROGRAM>_<FIELD>) and flags. An error of a configuration is a usage error.
//
// Exit status of every program: 0 it did its work, or was stopped and finished what was
// begun; 1 it failed; 2 it was called wrongly.
package boot
