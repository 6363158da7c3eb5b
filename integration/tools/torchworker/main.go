// Command torchworker is the worker of package remotetest as a program. MEANDER_PYTHON may name it in place of a Python
// with meander.torch.
package main

import (
	"os"

	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
)

func main() { os.Exit(remotetest.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }
