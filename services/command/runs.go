package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/archive"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// storedRun is a run as far as it is stored.
type storedRun struct {
	Run     schemas.Run `json:"run"`
	Groups  int         `json:"groups"`
	Open    int         `json:"open_groups"`
	Samples int         `json:"samples"`
	Events  uint64      `json:"events"`
	// Bytes is estimated from the mean size of the messages of each stream.
	Bytes  uint64    `json:"bytes"`
	Newest time.Time `json:"newest"`

	streams map[string]uint64
}

func runsCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "runs", Short: "what runs are stored; show, export, import and remove them", Args: args(noSuchCommand),
		Example: `  meander runs ls
  meander runs export night --out night.tar
  meander runs import night.tar
  meander runs rm night`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(runsLsCommand(a), runsShowCommand(a), runsRmCommand(a))
	c.AddCommand(runsExportCommand(a), runsReadCommand(a), runsImportCommand(a))
	return c
}

func runsLsCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "list the runs that are stored, the newest first", Args: args(cobra.NoArgs),
		Example: "  meander runs ls\n  meander runs ls --json",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			runs, err := storedRuns(c.Context(), conn.Bus, "*")
			if err != nil {
				return err
			}
			list := slices.SortedFunc(maps.Values(runs), func(x, y *storedRun) int { return y.Newest.Compare(x.Newest) })
			return a.printRuns(c.OutOrStdout(), list)
		}),
	}
}

// printRuns writes a line for each run. The id of a run is as long as it is; what follows it is narrow.
func (a *app) printRuns(out io.Writer, list []*storedRun) error {
	if a.json {
		for _, r := range list {
			if err := json.NewEncoder(out).Encode(r); err != nil {
				return err
			}
		}
		return nil
	}
	t := newColumns(out)
	fmt.Fprintln(t, "RUN\tGROUPS\tOPEN\tSAMPLES\tSIZE\tNEWEST")
	for _, r := range list {
		newest := "-"
		if !r.Newest.IsZero() {
			newest = time.Since(r.Newest).Round(time.Second).String() + " ago"
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%s\t%s\n", r.Run, r.Groups, r.Open, r.Samples, size(int64(r.Bytes)), newest)
	}
	return t.Flush()
}

// storedRuns counts what is stored of a run, or with "*" of each.
func storedRuns(ctx context.Context, b *bus.Bus, run schemas.Run) (map[schemas.Run]*storedRun, error) {
	stats, err := b.Stats(ctx)
	if err != nil {
		return nil, err
	}
	mean := map[string]uint64{}
	for _, s := range stats {
		mean[s.Name] = s.Bytes / max(1, s.Messages)
	}
	runs := map[schemas.Run]*storedRun{}
	for stream, filters := range schemas.RunFilters(run) {
		for _, filter := range filters {
			subjects, err := b.Subjects(ctx, stream, filter)
			if err != nil {
				return nil, err
			}
			for subject, n := range subjects {
				a, _ := schemas.ParseSubject(subject)
				r := runs[a.Run]
				if r == nil {
					r = &storedRun{Run: a.Run, streams: map[string]uint64{}}
					runs[a.Run] = r
				}
				r.Events += n
				r.Bytes += n * mean[stream]
				r.streams[stream] += n
				switch a.Kind {
				case schemas.KindGroup:
					r.Groups, r.Open = r.Groups+1, r.Open+1
				case schemas.KindAdvantage:
					r.Open--
				case schemas.KindTrajectory:
					r.Samples++
				}
			}
		}
	}
	for id, r := range runs {
		r.Open = max(0, r.Open)
		for _, of := range []struct{ stream, filter string }{
			{schemas.StreamAdvantages, schemas.Address{Kind: schemas.KindAdvantage, Run: id}.Filter()},
			{schemas.StreamTrajectories, schemas.TrajectoryFilter(id, "*")},
			{schemas.StreamPrompts, schemas.PromptSubject(id)},
		} {
			m, err := b.Last(ctx, of.stream, of.filter)
			if err != nil && !errors.Is(err, bus.ErrNotFound) {
				return nil, err
			}
			if err == nil && m.Time.After(r.Newest) {
				r.Newest = m.Time
			}
		}
	}
	return runs, nil
}

// theRun is one that is there.
func theRun(ctx context.Context, b *bus.Bus, name string) (*storedRun, error) {
	if err := schemas.CheckToken("RUN", name); err != nil {
		return nil, usage(err)
	}
	runs, err := storedRuns(ctx, b, schemas.Run(name))
	if err != nil {
		return nil, err
	}
	if r := runs[schemas.Run(name)]; r != nil {
		return r, nil
	}
	return nil, fmt.Errorf("run %q: nothing is stored of it; 'meander runs ls' lists those there are", name)
}

func runsShowCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "show RUN", Short: "what is stored of a run, by stream", Args: args(cobra.ExactArgs(1)), Example: "  meander runs show night",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			r, err := theRun(c.Context(), conn.Bus, given[0])
			if err != nil {
				return err
			}
			out := c.OutOrStdout()
			if a.json {
				return json.NewEncoder(out).Encode(map[string]any{"run": r, "streams": r.streams})
			}
			if err := a.printRuns(out, []*storedRun{r}); err != nil {
				return err
			}
			fmt.Fprintln(out)
			t := newColumns(out)
			fmt.Fprintln(t, "STREAM\tEVENTS")
			for _, s := range slices.Sorted(maps.Keys(r.streams)) {
				fmt.Fprintf(t, "%s\t%d\n", s, r.streams[s])
			}
			return t.Flush()
		}),
	}
}

func runsRmCommand(a *app) *cobra.Command {
	force := false
	c := &cobra.Command{
		Use: "rm RUN ...", Short: "remove runs for good, with the images that no other run names", Args: args(cobra.MinimumNArgs(1)),
		Long: `rm removes all events of runs, then the images and other blobs that no stored event names, once
they are two minutes old. Dead letters stay. A run with open groups is refused: cancel it first
(meander cancel), or --force. The id of a run that was removed must not be used again.`,
		Example: "  meander runs rm night",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			for _, name := range given {
				r, err := theRun(c.Context(), conn.Bus, name)
				if err != nil {
					return err
				}
				if r.Open > 0 && !force {
					return fmt.Errorf("run %s: %s open; cancel it first, or --force", name, count(r.Open, "group"))
				}
			}
			for _, name := range given {
				n, err := conn.Purge(c.Context(), schemas.Run(name))
				if err != nil {
					return err
				}
				fmt.Fprintf(c.OutOrStdout(), "run %s: %s removed\n", name, count(int(n), "event"))
			}
			n, err := conn.SweepBlobs(c.Context(), bus.BlobGrace, false)
			if err != nil {
				return err
			}
			fmt.Fprintf(c.OutOrStdout(), "%s removed that nothing names\n", count(n, "blob"))
			return nil
		}),
	}
	c.Flags().BoolVar(&force, "force", false, "also runs with open groups")
	return c
}

func runsExportCommand(a *app) *cobra.Command {
	out := ""
	c := &cobra.Command{
		Use: "export RUN", Short: "write a run to a file that needs no server", Args: args(cobra.ExactArgs(1)),
		Long: `export writes all events of a run, with the blobs that they name, to a tar file: each event is a file
of its msgpack bytes, STREAM/NUMBER-SUBJECT.msgpack, each blob blobs/<sha-256>, and SHA256SUMS has the digests
of all. 'meander runs read' lists and checks it, 'meander runs import' puts it into a store again; so can tar,
sha256sum and any msgpack library, and pkg/archive in Go.`,
		Example: "  meander runs export night --out night.tar\n  meander runs read night.tar",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) (err error) {
			if _, err := theRun(c.Context(), conn.Bus, given[0]); err != nil {
				return err
			}
			name := cmp.Or(out, given[0]+".tar")
			f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
			if err != nil {
				return fmt.Errorf("--out: %w; name a file that is not there", err)
			}
			s, err := archive.Write(c.Context(), conn.Bus, schemas.Run(given[0]), f)
			if err = errors.Join(err, f.Close()); err != nil {
				return errors.Join(err, os.Remove(name))
			}
			return a.printArchive(c.OutOrStdout(), name, s)
		}),
	}
	c.Flags().StringVar(&out, "out", "", "file to write; default RUN.tar")
	return c
}

func runsReadCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "read FILE", Short: "check and count what an exported run has; needs no server", Args: args(cobra.ExactArgs(1)),
		Long: `read compares every file of an export with its digest in SHA256SUMS, the steps with the digests that
their trajectories name, and tensors with those of their parts. What is not as it was written is named, and the
exit status is 1.`,
		Example: "  meander runs read night.tar",
		RunE: func(c *cobra.Command, given []string) error {
			f, err := os.Open(given[0])
			if err != nil {
				return err
			}
			defer func() { _ = f.Close() }() // read-only
			s := &archive.Summary{Events: map[string]int{}}
			named, here := map[string]bool{}, map[string]bool{}
			for e, err := range archive.Read(f) {
				if err != nil {
					return err
				}
				s.Bytes += int64(len(e.Data))
				for _, ref := range e.Refs() {
					named[ref.Digest] = true
				}
				switch {
				case e.Blob != "":
					s.Blobs++
					here[e.Blob] = true
				case a.json:
					line := map[string]any{"stream": e.Stream, "seq": e.Seq, "subject": e.Subject, "time": e.Time.UTC(), "event": schemas.JSONOfBytes(e.Data)}
					if err := json.NewEncoder(c.OutOrStdout()).Encode(line); err != nil {
						return err
					}
				default:
					s.Events[e.Stream]++
				}
			}
			for digest := range named {
				if !here[digest] {
					s.Missing++
				}
			}
			if a.json {
				return nil
			}
			return a.printArchive(c.OutOrStdout(), given[0], s)
		},
	}
}

func runsImportCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "import FILE", Short: "put an exported run back into a store", Args: args(cobra.ExactArgs(1)),
		Long: `import checks an export as 'meander runs read' does, and stores its events and blobs. All digests
stay the same; events get new sequences and are as old as the import. Done again it changes nothing, and after it was stopped it
goes on. A run that is stored with anything that the export does not have is refused, and nothing is written.

No service may run on the store: stop 'meander up' first. When it starts again, it goes on with groups that were open.`,
		Example: "  meander runs import night.tar\n  meander runs import night.tar --store other",
		RunE: func(c *cobra.Command, given []string) error {
			f, err := os.Open(given[0])
			if err != nil {
				return err
			}
			defer func() { _ = f.Close() }() // read-only
			return a.with(a.connect, func(c *cobra.Command, conn *connection, _ []string) error {
				return a.importRun(c, conn, f)
			})(c, given)
		},
	}
}

func (a *app) importRun(c *cobra.Command, conn *connection, f io.ReadSeeker) error {
	present, err := conn.Present(c.Context())
	if err != nil {
		return err
	}
	if len(present) > 0 {
		p := present[0]
		return fmt.Errorf("%s %s runs on this store, and would take a part of the run for a new one; "+
			"stop it first (one that was killed is forgotten after %v)", p.Service, p.Instance, schemas.PresenceTTL)
	}
	done, err := archive.Import(c.Context(), conn.Bus, f)
	if err != nil {
		return advise(c.Context(), conn.Bus, err)
	}
	if a.json {
		return json.NewEncoder(c.OutOrStdout()).Encode(done)
	}
	fmt.Fprintf(c.OutOrStdout(), "run %s: %s stored, %s there already, %s\n",
		done.Run, count(done.Stored, "event"), count(done.There, "event"), count(done.Blobs, "blob"))
	return nil
}

func (a *app) printArchive(out io.Writer, name string, s *archive.Summary) error {
	if a.json {
		return json.NewEncoder(out).Encode(s)
	}
	n := 0
	for _, k := range s.Events {
		n += k
	}
	fmt.Fprintf(out, "%s: %s and %s, %s\n", name, count(n, "event"), count(s.Blobs, "blob"), size(s.Bytes))
	for _, stream := range slices.Sorted(maps.Keys(s.Events)) {
		fmt.Fprintf(out, "  %-18s %8d\n", stream, s.Events[stream])
	}
	if s.Missing > 0 {
		fmt.Fprintf(out, "  %s named and not in it: no more stored then\n", count(s.Missing, "blob"))
	}
	return nil
}
