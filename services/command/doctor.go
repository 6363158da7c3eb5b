package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/services/doctor"
	"github.com/meander-rl/meander/services/internal/boot"
)

func doctorCommand(a *app) *cobra.Command {
	o := doctor.Options{}
	c := &cobra.Command{
		Use:   "doctor",
		Short: "look everything over, and say what is wrong and what to do about it",
		Long: `doctor looks at the server, its streams and consumers, what this credential may do,
limits, clocks, the services that run, the weights they use, the disk, and on this machine the model, what computes
and the reward functions. It changes nothing. Each finding is ok, a warning, a fault, or not
checked, with why; what is no longer ok comes with what to do.

It works without a server, on a store that nobody serves, on one that is served, and with
--nats on a server elsewhere. There, model, device and scorers are looked at when they are named.

Exit status: 0 no fault, 1 there is one, 2 called wrongly.`,
		Example: `  meander doctor
  meander doctor --nats nats://127.0.0.1:4222 --scorers scorers.yaml
  meander doctor --json | grep -v '"ok"'`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			if o.Timeout <= 0 {
				return usage(fmt.Errorf("--timeout: %v; must be positive", o.Timeout))
			}
			return a.doctor(c.Context(), o, c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&o.Model, "model", "", "model of samplers on this machine; default that of the pipeline on the store, or of 'meander up'")
	f.StringVar(&o.Device, "device", "", "device of samplers on this machine; default as for --model")
	f.StringVar(&o.Scorers, "scorers", "", "YAML file of reward functions on this machine; default as for --model")
	f.DurationVar(&o.Timeout, "timeout", doctor.DefaultTimeout, "how long each check may take")
	return c
}

func (a *app) doctor(ctx context.Context, o doctor.Options, out io.Writer) error {
	log := zerolog.Nop() // what goes wrong is a finding
	o.Version = boot.Version()
	if a.natsURL == "" {
		own := defaultServices().Config
		of, _ := natsd.Pipeline(a.store)
		o.Model = cmp.Or(o.Model, of.Settings["model"], own.Sampler.Model)
		o.Device = cmp.Or(o.Device, of.Settings["device"], own.Sampler.Device)
		o.Scorers = cmp.Or(o.Scorers, of.Settings["scorers"])
		o.DiskFree = func() (int64, error) { return natsd.DiskFree(existing(a.store)) }
	}
	if _, err := os.Stat(filepath.Join(a.store, "jetstream")); a.natsURL == "" && errors.Is(err, os.ErrNotExist) {
		o.Empty, o.NoServer = true, fmt.Errorf("store %q has nothing in it yet", a.store)
	} else {
		looks := *a
		looks.asItIs = true
		reach, stop := context.WithTimeout(ctx, o.Timeout)
		conn, err := looks.connect(reach, log)
		stop()
		if exit, ok := errors.AsType[*exitError](err); ok {
			return exit
		}
		if err != nil {
			o.NoServer = err
		} else {
			defer func() { _ = conn.Close() }() // nothing was sent
			o.Bus, o.Where, o.Own, o.Servers = conn.Bus, conn.where, conn.serves(), a.addresses()
		}
	}
	p := &chart{out: out, json: a.json, counts: map[doctor.State]int{}}
	doctor.Run(ctx, o, p.finding)
	if err := ctx.Err(); err != nil {
		return err
	}
	p.summary()
	if p.counts[doctor.Fault] > 0 {
		return &exitError{status: exitFailed}
	}
	return nil
}

// addresses are those of the servers of --nats.
func (a *app) addresses() (out []string) {
	for _, server := range (boot.NATS{URL: a.natsURL}).Servers() {
		if u, err := url.Parse(server); err == nil && u.Hostname() != "" {
			out = append(out, net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), strconv.Itoa(nats.DefaultPort))))
		}
	}
	return out
}

// existing is the folder, or the nearest one above it that is there.
func existing(dir string) string {
	for {
		_, err := os.Stat(dir)
		above := filepath.Dir(dir)
		if err == nil || above == dir {
			return dir
		}
		dir = above
	}
}

// chart prints findings: for people by area, else a line of JSON for each.
type chart struct {
	out    io.Writer
	json   bool
	area   string
	counts map[doctor.State]int
}

// What stands before a finding: the widest state, and two blanks on either side.
var (
	findingIndent = "  "
	findingGap    = strings.Repeat(" ", len(findingIndent)+len(doctor.Unchecked)+2)
)

func (p *chart) finding(f doctor.Finding) {
	p.counts[f.State]++
	if p.json {
		_ = json.NewEncoder(p.out).Encode(f) // nobody is left to tell
		return
	}
	if f.Area != p.area {
		fmt.Fprintln(p.out, bold(p.out, f.Area))
		p.area = f.Area
	}
	colour := map[doctor.State]string{doctor.OK: sgrGreen, doctor.Warning: sgrYellow, doctor.Fault: sgrRed}[f.State]
	state := string(f.State)
	blanks := strings.Repeat(" ", len(findingGap)-len(findingIndent)-len(state))
	if colour != "" {
		state = paint(p.out, colour, state)
	}
	columns := lineWidth(p.out) - len(findingGap)
	between := "\n" + findingGap
	fmt.Fprintf(p.out, "%s%s%s%s\n", findingIndent, state, blanks, breakLines(f.Says, columns, between))
	if f.Fix != "" {
		fmt.Fprintf(p.out, "%s%s\n", findingGap, breakLines("-> "+f.Fix, columns, between))
	}
}

func (p *chart) summary() {
	if p.json {
		return
	}
	parts := []string{fmt.Sprintf("%d ok", p.counts[doctor.OK]), count(p.counts[doctor.Warning], "warning"), count(p.counts[doctor.Fault], "fault")}
	if n := p.counts[doctor.Unchecked]; n > 0 {
		parts = append(parts, fmt.Sprintf("%d not checked", n))
	}
	fmt.Fprintf(p.out, "\n%s\n", strings.Join(parts, ", "))
}
