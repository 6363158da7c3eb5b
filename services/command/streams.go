package command

import (
	"context"
	"encoding/json"
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
)

func streamsCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "streams", Short: "how full the streams are, how far their consumers are behind, and what to do about it",
		Long: `streams shows what each stream holds, its limits and its state, then how far each
consumer is. A stream that is full refuses what is published: nothing is dropped, and
what wants to publish waits until there is room.

Exit status: 0 every stream takes events, 1 one does not.`,
		Example: `  meander streams
  meander streams limit --max-steps-bytes 32GiB    # of a pipeline that runs, too
  meander streams purge night`,
		Args: args(noSuchCommand),
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			stats, err := conn.Stats(c.Context())
			if err != nil {
				return err
			}
			faults, err := conn.Faults(c.Context())
			if err != nil {
				return err
			}
			out := c.OutOrStdout()
			if a.json {
				for _, s := range stats {
					if err := json.NewEncoder(out).Encode(s); err != nil {
						return err
					}
				}
			} else if err := printStreams(out, stats); err != nil {
				return err
			}
			paused, err := conn.PausedRuns(c.Context())
			if err != nil {
				return err
			}
			for _, p := range paused {
				fmt.Fprintf(c.ErrOrStderr(), "%s; it goes on with: meander resume %s\n", p.Says(), p.Run)
			}
			for _, server := range lacking(stats) {
				line := fmt.Sprintf("server %s is down, or behind: see 'meander doctor'", server)
				fmt.Fprintln(c.ErrOrStderr(), paint(c.ErrOrStderr(), sgrRed, line))
			}
			for _, f := range faults {
				fmt.Fprintln(c.ErrOrStderr(), paint(c.ErrOrStderr(), sgrRed, boot.Advice(f)))
			}
			if len(faults) > 0 {
				return &exitError{status: exitFailed}
			}
			return nil
		}),
	}
	c.AddCommand(setupCommand(a), limitCommand(a), purgeCommand(a))
	return c
}

// printStreams writes a line for each stream, and one for each durable consumer.
func printStreams(out io.Writer, stats []bus.StreamStats) error {
	t := newColumns(out)
	fmt.Fprintln(t, "STREAM\tMESSAGES\tSIZE\tLIMIT\tUSED\tKEPT\tSERVERS\tSTATE\tNEWEST")
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
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", s.Name, s.Messages, size(int64(s.Bytes)), size(s.MaxBytes), used, kept, servers, s.State, newest)
	}
	fmt.Fprintln(t, "\nCONSUMER\tSTREAM\tWAITING\tIN HAND\tREDELIVERED")
	for _, s := range stats {
		for _, k := range s.Consumers {
			fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\n", k.Name, s.Name, k.Pending, k.AckPending, k.Redelivered)
		}
	}
	return t.Flush()
}

// lacking are the servers that do not have all of what they are to keep.
func lacking(stats []bus.StreamStats) (servers []string) {
	for _, s := range stats {
		servers = append(servers, s.Lacking...)
	}
	slices.Sort(servers)
	return slices.Compact(servers)
}

// fits says how many more groups of the mean size of those that are stored have room, and which stream is full then.
func fits(stats []bus.StreamStats) string {
	of := map[string]*bus.StreamStats{}
	for i := range stats {
		of[stats[i].Name] = &stats[i]
	}
	groups, samples := of[schemas.StreamGroups].Messages, of[schemas.StreamTrajectories].Messages
	if groups == 0 || samples == 0 {
		return "how much fits is told once there are groups, by their size"
	}
	least, first := math.Inf(1), ""
	for _, name := range []string{
		schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamRewards, schemas.StreamAdvantages,
		schemas.StreamGroups, bus.BlobStream,
	} {
		s := of[name]
		if s.MaxBytes <= 0 || s.Bytes == 0 {
			continue
		}
		room := float64(s.MaxBytes) - float64(s.Bytes) - float64(s.Held)
		if n := room / (float64(s.Bytes) / float64(groups)); n < least {
			least, first = max(0, n), name
		}
	}
	if first == "" {
		return "without limits of bytes the disk alone says how much fits"
	}
	const says = "room for about %.0f more groups, %.0f samples, of the mean size of the %d that are stored; then %s is full"
	return fmt.Sprintf(says, math.Floor(least), math.Floor(least*float64(samples)/float64(groups)), groups, first)
}

// watchFaults says which streams take nothing or are nearly full, what to do about it, and when they
// take events again, until ctx ends.
func watchFaults(ctx context.Context, b *bus.Bus, say func(line string)) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	told, scarce := map[string]bool{}, map[string]bool{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		faults, err := b.Faults(ctx)
		if err != nil {
			continue // a server that is away is another matter
		}
		now := map[string]bool{}
		for _, f := range faults {
			if now[f.Name] = true; !told[f.Name] {
				say(boot.Advice(f))
			}
		}
		for name := range told {
			if !now[name] {
				say(name + " takes events again")
			}
		}
		told = now
		all, err := b.Examine(ctx, false)
		if err != nil {
			continue
		}
		for i := range all {
			s := &all[i].StreamStats
			what, fix := boot.Scarce(s)
			if what != "" && !scarce[s.Name] {
				say(what + "; " + fix)
			}
			scarce[s.Name] = what != "" || s.State == bus.StateFull
		}
	}
}

// advise adds what to do to the error of a full stream.
func advise(ctx context.Context, b *bus.Bus, err error) error {
	if !errors.Is(err, bus.ErrStreamFull) {
		return err
	}
	faults, _ := b.Faults(ctx)
	for _, f := range faults {
		err = fmt.Errorf("%w\n%s", err, boot.Advice(f))
	}
	return err
}

func setupCommand(a *app) *cobra.Command {
	var limits boot.Limits
	var auth string
	c := &cobra.Command{
		Use: "setup", Short: "make the streams, or bring them up to date",
		Long: `setup makes the streams and buckets of a server that has none, and brings those of an older
release up to date; what is stored stays, and so do limits that no flag names. On a server with
roles it is for the role admin. Elsewhere meander-intake does it, and up and run do.`,
		Example: `  meander streams setup --nats tls://nats.example.org:4222 --nats-creds auth/admin.creds --nats-tls-ca auth/tls/ca.pem
  meander streams setup --nats nats://a:4222,nats://b:4222,nats://c:4222 --stream-replicas 3
  meander streams setup --nats tls://nats.example.org:4222 --nats-creds auth/admin.creds --auth auth    # and copies for guests`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			log, err := a.logger()
			if err != nil {
				return err
			}
			if a.natsURL == "" {
				return usage(errors.New("--nats: empty; must be the server that is to have the streams. A store gets them from whoever opens it"))
			}
			if err := limits.Validate(); err != nil {
				return settingError(err)
			}
			var folder *authFolder
			if auth != "" {
				if folder, err = openAuth(auth); err != nil {
					return err
				}
			}
			server := a.server()
			server.NoWait = true
			b, err := bus.Connect(c.Context(), server, log)
			if err != nil {
				return a.why(err)
			}
			if err = b.Setup(c.Context(), bus.Replicas(int(limits.StreamReplicas))); err == nil {
				err = limits.Apply(c.Context(), b)
			}
			if err == nil {
				_, err = fmt.Fprintf(c.OutOrStdout(), "%s has the streams\n", bus.RedactURL(a.natsURL))
			}
			if err == nil && folder != nil {
				guests := folder.guests()
				if err = b.SetupGuests(c.Context(), guests); err == nil {
					_, err = fmt.Fprintf(c.OutOrStdout(), "and copies for %s\n", count(len(guests), "guest"))
				}
			}
			return errors.Join(err, b.Close())
		},
	}
	c.Flags().StringVar(&auth, "auth", "", "folder of meander auth init: make the copies that its guests read, users who are limited to runs")
	limits.Flags(c.Flags())
	return c
}

func limitCommand(a *app) *cobra.Command {
	var limits boot.Limits
	c := &cobra.Command{
		Use: "limit", Short: "change the limits of streams, while they are in use or not", Args: args(cobra.NoArgs),
		Long: `limit changes what the flags name and leaves the rest as it is. What waits for room in
a stream goes on by itself once there is some. A size below what a stream holds is
refused; a shorter age removes at once what is older.`,
		Example: `  meander streams limit --max-steps-bytes 32GiB --max-blobs-bytes 32GiB
  meander streams limit --max-trajectories-age 30d --max-steps-age 31d
  meander streams limit --max-steps-age forever
  meander streams limit --stream-replicas 3    # of a cluster`,
		RunE: func(c *cobra.Command, given []string) error {
			if !limits.Any() {
				return usage(errors.New("no limit is given; name one, such as --max-steps-bytes 32GiB"))
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
				if err := printStreams(c.OutOrStdout(), stats); err != nil {
					return err
				}
				_, err = fmt.Fprintf(c.OutOrStdout(), "\n%s\n", fits(stats))
				return err
			})(c, given)
		},
	}
	limits.Flags(c.Flags())
	return c
}

func purgeCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "purge RUN ...", Short: "remove all events of runs for good", Args: args(cobra.MinimumNArgs(1)),
		Long: `purge removes the prompts, requests, steps, trajectories, verdicts, rewards, advantages
and batches of runs. Images stay, since other runs may refer to the same ones, and
so do dead letters. The id of a purged run must not be used again.`,
		Example: "  meander streams purge night",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			for _, run := range given {
				if err := schemas.CheckToken("RUN", run); err != nil {
					return usage(err)
				}
			}
			for _, run := range given {
				n, err := conn.Purge(c.Context(), schemas.Run(run))
				if err != nil {
					return err
				}
				fmt.Fprintf(c.OutOrStdout(), "run %s: %s removed\n", run, count(int(n), "event"))
			}
			return nil
		}),
	}
}

// size is a number of bytes for people.
func size(n int64) string {
	if n <= 0 {
		return "-"
	}
	return boot.Bytes(n).Rough()
}
