package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/services/doctor"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

// doctorCommand makes the command 'meander doctor'.
func doctorCommand(a *app) *cobra.Command {
	o := doctor.Options{Timeout: doctor.DefaultTimeout}
	c := &cobra.Command{
		Use:   "doctor",
		Short: "check everything, and say what is wrong and how to fix it",
		Long: `doctor checks the server, its streams, consumers and limits, your permissions, clocks, the running
services and their weights, the counts of the newest runs, and the disk. On this machine it also checks
the model, the device and the reward functions. It changes nothing. Each finding is ok, a warning, a
fault, or not checked (with the reason). Warnings and faults come with a fix.

It works on a store with or without a running pipeline, with --nats on a server elsewhere, and without
any server. With --nats it checks model, device and scorers only if you name them.

Exit status: 0 no fault, 1 at least one fault, 2 wrong usage.`,
		Example: `  meander doctor
  meander doctor --nats nats://127.0.0.1:4222 --scorers scorers.yaml
  meander doctor --json | grep -v '"ok"'`,
		RunE: func(c *cobra.Command, _ []string) error { return a.doctor(c.Context(), o, c.OutOrStdout()) },
	}
	flagsOf(c, &o)
	return c
}

// doctor connects, if it can, runs all checks and prints their findings. A fault gives exit status 1; no server is a
// finding, not an error.
func (a *app) doctor(ctx context.Context, o doctor.Options, out io.Writer) error {
	log := zerolog.Nop() // errors become findings
	o.Version = boot.Version()
	if a.nats.URL == "" {
		own := defaultServices().Config
		running, _ := natsd.Pipeline(a.store)
		o.Model = cmp.Or(o.Model, running.Settings["model"], own.Sampler.Model)
		o.Device = cmp.Or(o.Device, running.Settings["device"], own.Sampler.Device)
		o.Engine = cmp.Or(o.Engine, running.Settings["engine"])
		o.Scorers = cmp.Or(o.Scorers, running.Settings["scorers"])
		o.DiskFree = func() (int64, error) { return natsd.DiskFree(existingFolder(a.store)) }
	}
	o.EngineKey = engineKey(o.Engine)
	if _, err := os.Stat(filepath.Join(a.store, "jetstream")); a.nats.URL == "" && errors.Is(err, os.ErrNotExist) {
		o.Empty, o.NoServer = true, fmt.Errorf("store %q has nothing in it yet", a.store)
	} else {
		reader := *a
		reader.asItIs = true
		reach, stop := context.WithTimeout(ctx, o.Timeout)
		conn, err := reader.connect(reach, log)
		stop()
		if exit, ok := errors.AsType[*exitError](err); ok {
			return exit
		}
		if err != nil {
			o.NoServer = err
		} else {
			defer func() { _ = conn.Close() }() // nothing was sent
			o.Bus, o.Where, o.Own, o.Servers = conn.Bus, conn.where, conn.serves(), a.addresses()
			o.Certificate = conn.certificate()
		}
	}
	p := &findingPrinter{out: out, json: a.json, counts: map[doctor.State]int{}}
	doctor.Run(ctx, o, p.printFinding)
	if err := ctx.Err(); err != nil {
		return err
	}
	p.printSummary()
	if p.counts[doctor.Fault] > 0 {
		return &exitError{status: exitFailed}
	}
	return nil
}

// existingFolder returns the folder, or the nearest folder above it that exists, to measure a disk.
func existingFolder(dir string) string {
	for {
		_, err := os.Stat(dir)
		above := filepath.Dir(dir)
		if err == nil || above == dir {
			return dir
		}
		dir = above
	}
}

// findingPrinter prints findings: for people by area, else a line of JSON for each.
type findingPrinter struct {
	out    io.Writer
	json   bool
	area   string
	counts map[doctor.State]int
}

// printFinding prints one finding of the doctor, with its fix, and counts it.
func (p *findingPrinter) printFinding(f doctor.Finding) {
	p.counts[f.State]++
	if p.json {
		_ = encode(p.out, f) // output keeps the error
		return
	}
	if f.Area != p.area {
		fmt.Fprintln(p.out, present.Paint(p.out, present.Bold, f.Area))
		p.area = f.Area
	}
	colour := map[doctor.State]present.Colour{
		doctor.OK: present.Green, doctor.Warning: present.Yellow,
		doctor.Fault: present.Red,
	}[f.State]
	const columns = 2 + len(doctor.Unchecked) + 2 // the widest state, with two blanks on either side
	present.Field(p.out, columns, "  "+present.Paint(p.out, colour, string(f.State)), f.Says)
	if f.Fix != "" {
		present.Field(p.out, columns, "", "-> "+f.Fix)
	}
}

// printSummary prints how many findings there were of each state; with --json nothing.
func (p *findingPrinter) printSummary() {
	if p.json {
		return
	}
	parts := []string{
		fmt.Sprintf("%d ok", p.counts[doctor.OK]), present.Count(p.counts[doctor.Warning], "warning"),
		present.Count(p.counts[doctor.Fault], "fault"),
	}
	if n := p.counts[doctor.Unchecked]; n > 0 {
		parts = append(parts, fmt.Sprintf("%d not checked", n))
	}
	fmt.Fprintf(p.out, "\n%s\n", strings.Join(parts, ", "))
}
