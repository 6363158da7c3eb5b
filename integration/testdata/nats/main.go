// The program nats stands in for the command line of NATS, as far as documents use it:
// nats --server URL --tlsca FILE req SUBJECT BODY.
package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

func main() {
	args := os.Args[1:]
	if len(args) != 7 || args[0] != "--server" || args[2] != "--tlsca" || args[4] != "req" {
		fmt.Fprintf(os.Stderr, "nats: %q\n", args)
		os.Exit(2)
	}
	nc, err := nats.Connect(args[1], nats.RootCAs(args[3]))
	if err == nil {
		var m *nats.Msg
		m, err = nc.Request(args[5], []byte(args[6]), 10*time.Second)
		if err == nil && strings.Contains(string(m.Data), `"error"`) {
			err = fmt.Errorf("%s", m.Data)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
