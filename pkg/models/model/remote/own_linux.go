package remote

import (
	"os/exec"
	"syscall"
)

// own gives a process a group of its own, and has the system end it when this process ends.
func own(c *exec.Cmd) {
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// interrupt asks a process to end.
func interrupt(c *exec.Cmd) { _ = c.Process.Signal(syscall.SIGTERM) }

// killAll ends a process and its children.
func killAll(c *exec.Cmd) { _ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
