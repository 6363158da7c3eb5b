package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// measured is a program whose memory is read while it runs, in bytes; -1: the kernel does not say.
type measured struct {
	*exec.Cmd
	out       bytes.Buffer // stdout, and without logs stderr
	ended     chan error
	peak      int // of all
	anonymous int // of what is not of files, at the peak of that
}

// newMeasured is a program of a folder, which start begins.
func newMeasured(ctx context.Context, folder, name string, args ...string) *measured {
	m := &measured{
		Cmd: exec.CommandContext(ctx, filepath.Join(folder, name), args...), ended: make(chan error, 1), peak: -1,
		anonymous: -1,
	}
	m.Stdout, m.Stderr = &m.out, &m.out
	return m
}

func (m *measured) start() error {
	if err := m.Start(); err != nil {
		return fmt.Errorf("%w; 'make build' makes the programs", err)
	}
	go func() { m.ended <- m.Wait() }()
	return nil
}

// stop ends a program that runs until it is told to.
func (m *measured) stop() error {
	if err := m.Process.Signal(os.Interrupt); err != nil {
		return err
	}
	return m.finish()
}

// reset begins a new peak, where the kernel can.
func (m *measured) reset() {
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", m.Process.Pid), []byte("5"), 0)
	m.peak, m.anonymous = -1, -1
}

// look reads the memory.
func (m *measured) look() {
	m.peak = max(m.peak, memoryOf(m.Process.Pid, "VmHWM"))
	m.anonymous = max(m.anonymous, memoryOf(m.Process.Pid, "RssAnon"))
}

// memoryOf is what the kernel says of the memory of a process, in bytes; -1: nothing.
func memoryOf(pid int, field string) int {
	v, _ := procField(fmt.Sprintf("/proc/%d/status", pid), field)
	n, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(v, "kB")))
	if err != nil {
		return -1
	}
	return n << 10
}

// cpu returns the processor time so far, in seconds; 0 where the kernel does not say.
func (m *measured) cpu() float64 {
	if m.ProcessState != nil {
		return (m.ProcessState.UserTime() + m.ProcessState.SystemTime()).Seconds()
	}
	return processCPU(m.Process.Pid)
}

// processCPU is the processor time of a process that runs.
func processCPU(pid int) float64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	const user, system, ticks = 11, 12, 100 // fields behind the name; Linux counts hundredths
	_, after, _ := strings.Cut(string(data), ") ")
	fields := strings.Fields(after)
	if len(fields) <= system {
		return 0
	}
	u, _ := strconv.ParseFloat(fields[user], 64)
	s, _ := strconv.ParseFloat(fields[system], 64)
	return (u + s) / ticks
}

// finish looks until the program has ended.
func (m *measured) finish(others ...*measured) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-m.ended:
			if err != nil {
				err = fmt.Errorf("%s: %w\n%s", m.Path, err, m.out.String())
			}
			return err
		case <-tick.C:
			for _, p := range append(others, m) {
				p.look()
			}
		}
	}
}

// inMB is a number of bytes in 10^6; "-" for what is not known.
func inMB(bytes int) string {
	if bytes < 0 {
		return "-"
	}
	return strconv.Itoa(bytes / 1e6)
}
