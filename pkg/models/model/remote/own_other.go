//go:build !linux

package remote

import (
	"os"
	"os/exec"
)

// own leaves a process as it is: it ends with its stdin.
func own(*exec.Cmd) {}

// interrupt asks a process to end.
func interrupt(c *exec.Cmd) { _ = c.Process.Signal(os.Interrupt) }

// killAll ends a process.
func killAll(c *exec.Cmd) { _ = c.Process.Kill() }
