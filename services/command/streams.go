package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

// streamsCommand makes the command 'meander streams' with its subcommands.
func streamsCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "streams", Short: "show how full the streams are and how far consumers are behind",
		Long: `streams shows the size, limits and state of each stream, then the progress of each consumer. A full
stream refuses new events. No event is lost: publishers wait until there is space.

Exit status: 0 every stream accepts events, 1 one does not.`,
		Example: `  meander streams
  meander streams limit --max-steps-bytes 32GiB    # also while a pipeline runs`,
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			stats, err := conn.Stats(c.Context())
			if err != nil {
				return err
			}
			faults := conn.FaultsOf(stats)
			out := c.OutOrStdout()
			if a.json {
				err = encode(out, stats...)
			} else {
				printStreams(out, stats)
			}
			if err != nil {
				return err
			}
			paused, err := conn.PausedRuns(c.Context())
			if err != nil {
				return err
			}
			for _, p := range paused {
				fmt.Fprintf(c.ErrOrStderr(), "%s; continue it with: meander resume %s\n", p.Sentence(), p.Run)
			}
			for _, server := range laggingServers(stats) {
				line := fmt.Sprintf("server %s is down or behind; see 'meander doctor'", server)
				fmt.Fprintln(c.ErrOrStderr(), present.Paint(c.ErrOrStderr(), present.Red, line))
			}
			for _, f := range faults {
				fmt.Fprintln(c.ErrOrStderr(), present.Paint(c.ErrOrStderr(), present.Red, boot.Advice(f)))
			}
			if len(faults) > 0 {
				return &exitError{status: exitFailed}
			}
			return nil
		}),
	}
	c.AddCommand(setupCommand(a), limitCommand(a))
	return c
}

// printStreams writes a line for each stream, and one for each durable consumer.
func printStreams(out io.Writer, stats []bus.StreamStats) {
	t := present.New("STREAM", "MESSAGES", "SIZE", "LIMIT", "USED", "KEPT", "SERVERS", "STATE", "NEWEST")
	for _, s := range stats {
		newest, used := "-", "-"
		if !s.Newest.IsZero() {
			newest = time.Since(s.Newest).Round(time.Second).String() + " ago"
		}
		if s.MaxBytes > 0 {
			used = fmt.Sprintf("%d%%", 100*s.Bytes/uint64(s.MaxBytes))
		}
		kept := boot.Age(s.MaxAge).String()
		if s.MaxAge == 0 {
			kept = "for ever"
		}
		servers := strconv.Itoa(s.Replicas)
		if s.Current < s.Replicas {
			servers = fmt.Sprintf("%d of %d", s.Current, s.Replicas)
		}
		t.Row(s.Name, s.Messages, present.Size(s.Bytes), present.Size(s.MaxBytes), used, kept, servers, s.State, newest)
	}
	t.Print(out)
	fmt.Fprintln(out)
	t = present.New("CONSUMER", "STREAM", "WAITING", "IN FLIGHT", "REDELIVERED")
	for _, s := range stats {
		for _, k := range s.Consumers {
			t.Row(k.Name, s.Name, k.Pending, k.AckPending, k.Redelivered)
		}
	}
	t.Print(out)
}

// laggingServers returns the servers that lack streams which they should keep, sorted.
func laggingServers(stats []bus.StreamStats) (servers []string) {
	for _, s := range stats {
		servers = append(servers, s.Lacking...)
	}
	slices.Sort(servers)
	return slices.Compact(servers)
}

// spaceLeft says how many more groups of the mean stored size have space, and which stream is full then; 'meander
// streams limit' ends with it.
func spaceLeft(stats []bus.StreamStats) string {
	byName := map[string]*bus.StreamStats{}
	for i := range stats {
		byName[stats[i].Name] = &stats[i]
	}
	groups, samples := byName[schemas.StreamGroups].Messages, byName[schemas.StreamTrajectories].Messages
	if groups == 0 || samples == 0 {
		return "store a group first: its size then says how many more fit"
	}
	least, first := math.Inf(1), ""
	for _, name := range []string{
		schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamRewards, schemas.StreamAdvantages,
		schemas.StreamGroups, schemas.StreamBlobBucket,
	} {
		s := byName[name]
		if s.MaxBytes <= 0 || s.Bytes == 0 {
			continue
		}
		space := float64(s.MaxBytes) - float64(s.Bytes) - float64(s.Held)
		if n := space / (float64(s.Bytes) / float64(groups)); n < least {
			least, first = max(0, n), name
		}
	}
	if first == "" {
		return "no stream has a limit in bytes: only the disk limits how much fits"
	}
	const says = "space for about %.0f more groups, %.0f samples, of the mean size of the %d stored groups; then %s " +
		"is full"
	return fmt.Sprintf(says, math.Floor(least), math.Floor(least*float64(samples)/float64(groups)), groups, first)
}

// faultTick is how often watchFaults looks at the streams. A look takes some 5 ms of a processor, also of a pipeline
// that has nothing to do.
const faultTick = 3 * time.Second

// watchFaults tells with printLine which streams refuse events or are nearly full, what to do about it, and when they
// accept events again, until ctx ends. 'meander up' and 'meander run' run it beside their services.
func watchFaults(ctx context.Context, b *bus.Bus, printLine func(line string)) {
	tick := time.NewTicker(faultTick)
	defer tick.Stop()
	told, scarce := map[string]bool{}, map[string]bool{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		all, err := b.Sizes(ctx)
		if err != nil {
			continue // other code reports a lost server
		}
		now := map[string]bool{}
		for _, f := range b.FaultsOf(all) {
			if now[f.Name] = true; !told[f.Name] {
				printLine(boot.Advice(f))
			}
		}
		for name := range told {
			if !now[name] {
				printLine(name + " accepts events again")
			}
		}
		told = now
		for i := range all {
			s := &all[i]
			what, fix := boot.Scarce(s)
			if what != "" && !scarce[s.Name] {
				printLine(what + "; " + fix)
			}
			scarce[s.Name] = what != "" || s.State == bus.StateFull
		}
	}
}

// withAdvice adds to the error of a full stream what to do; other errors are returned as they are.
func withAdvice(ctx context.Context, b *bus.Bus, err error) error {
	if !errors.Is(err, bus.ErrStreamFull) {
		return err
	}
	faults, _ := b.Faults(ctx)
	for _, f := range faults {
		err = fmt.Errorf("%w\n%s", err, boot.Advice(f))
	}
	return err
}

// setupCommand makes the command 'meander streams setup'.
func setupCommand(a *app) *cobra.Command {
	var limits boot.Limits
	c := &cobra.Command{
		Use: "setup", Short: "create the streams, or update them",
		Long: `setup creates the streams and buckets on a server, or updates those of an older release. Stored events
stay, and so do limits without a flag here. On a server with roles it needs the role admin. On other
servers meander-intake, 'meander up' and 'meander run' do it themselves.`,
		Example: `  meander streams setup --nats tls://nats.example.org:4222 --nats-creds auth/admin.creds --nats-tls-ca auth/tls/ca.pem
  meander streams setup --nats nats://a:4222,nats://b:4222,nats://c:4222 --stream-replicas 3`,
		RunE: func(c *cobra.Command, _ []string) error {
			if a.nats.URL == "" {
				return usage(errors.New("--nats: empty; must be the server to set up. A store needs no setup: " +
					"'meander up' and 'meander run' do it"))
			}
			if err := limits.Validate(); err != nil {
				return settingError(err)
			}
			server := a.nats.Bus("meander")
			server.ConnectTimeout, server.NoWait = 0, true // it does not wait for ever
			b, err := bus.Connect(c.Context(), server, a.logger())
			if err != nil {
				return a.explainConnectError(err)
			}
			err = b.Setup(c.Context(), bus.Replicas(int(limits.StreamReplicas)))
			if err == nil {
				err = limits.Apply(c.Context(), b)
			}
			if err == nil {
				_, err = fmt.Fprintf(c.OutOrStdout(), "%s has the streams\n", bus.RedactURL(a.nats.URL))
			}
			return errors.Join(err, b.Close())
		},
	}
	limits.Flags(c.Flags())
	return c
}

// limitCommand makes the command 'meander streams limit'.
func limitCommand(a *app) *cobra.Command {
	var limits boot.Limits
	c := &cobra.Command{
		Use: "limit", Short: "change the limits of streams; they may be in use",
		Long: `limit changes the limits that you give, and no others. Publishers that wait for space continue by
themselves. A size below the current size of a stream is refused. A shorter age removes older events at
once.`,
		Example: `  meander streams limit --max-steps-bytes 32GiB --max-blobs-bytes 32GiB
  meander streams limit --max-trajectories-age 30d --max-steps-age 31d
  meander streams limit --max-steps-age forever
  meander streams limit --stream-replicas 3    # on a cluster`,
		RunE: func(c *cobra.Command, given []string) error {
			if !limits.Any() {
				return usage(errors.New("no limit given (0 is none); give one, such as --max-steps-bytes 32GiB"))
			}
			if err := limits.Validate(); err != nil {
				return settingError(err)
			}
			return a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
				if err := limits.Apply(c.Context(), conn.Bus); err != nil {
					return err
				}
				stats, err := conn.Stats(c.Context())
				if err != nil {
					return err
				}
				printStreams(c.OutOrStdout(), stats)
				_, err = fmt.Fprintf(c.OutOrStdout(), "\n%s\n", spaceLeft(stats))
				return err
			})(c, given)
		},
	}
	limits.Flags(c.Flags())
	return c
}
