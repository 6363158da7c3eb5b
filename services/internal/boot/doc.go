// Package boot is what every main of the project shares: configuration, logging,
// signals, the health endpoint, the NATS connection's settings and the exit status.
// A Service is one program; Main runs it from its command line to its exit status.
//
// A configuration is one struct per program. Each field has a koanf tag (its key in
// snake_case) and a help tag; the struct's value is the default. From that come, in
// rising order of precedence:
//
//	the default          the struct's value
//	a YAML file          --config FILE, keys as in the koanf tags
//	the environment      MEANDER_<PROGRAM>_<FIELD>; nested structs are joined by "__",
//	                     or have a prefix of their own in an env tag (MEANDER_NATS_URL)
//	flags                --<field> in kebab-case, nested structs joined by "-"
//
// An unknown key or variable is an error that names it. Durations and sizes carry
// units ("30s", "64MiB"). A secret:"true" field is printed as "***".
//
// Exit status of every program: 0 it did its work, or was stopped and finished what was
// begun; 1 it failed; 2 it was called wrongly.
//
// In Load, koanf merges the sources; a field is one setting, with its path in the YAML file (the koanf keys joined by
// dots), its variable and its flag. A fault is a mistake in a setting; the faults of a source are joined.
//
// A program calls Main or Execute; that calls AddFlags, Load (loadFile, loadEnv, loadFlags, then Validate) or Print,
// and then serve. An error of a configuration is a usage error.
package boot
