//go:build unix

package scorer

import (
	"os/exec"
	"syscall"
)

// separate gives a process a group of its own: Ctrl-C on the terminal is for us, who end the process in order.
func separate(c *exec.Cmd) { c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }
