// Command meander is the whole pipeline in one binary and its command line: it
// can run everything in one process with an embedded NATS server, or talk to
// services that run elsewhere.
package main

import "github.com/meander-rl/meander/services/command"

func main() { command.Main() }
