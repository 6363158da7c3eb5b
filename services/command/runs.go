package command

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

// runsCommand makes the command 'meander runs' with its subcommands.
func runsCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "runs", Short: "list, show, tag, export, import, replay and remove stored runs",
		Example: `  meander runs ls
  meander runs export night --out night.tar
  meander runs import night.tar
  meander runs replay night --speed 10
  meander runs tag night baseline
  meander runs rm night`,
	}
	c.AddCommand(runsLsCommand(a), runsShowCommand(a), runsCompareCommand(a), runsPromptsCommand(a), runsRmCommand(a))
	c.AddCommand(runsTagCommand(a), runsNoteCommand(a))
	c.AddCommand(runsExportCommand(a), runsReadCommand(a), runsImportCommand(a), runsReplayCommand(a))
	return c
}

// runsLsCommand makes the command 'meander runs ls'.
func runsLsCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "list the stored runs, the newest first",
		Long: `ls lists the stored runs. SIZE is an estimate: the number of events, times the size of a few of them.
Images and other blobs are not in it. A run that has ended is measured once; 'meander runs show' measures it again.
MEAN is that of the mean rewards of all groups. TAGS are of 'meander runs tag'; --json has the notes, too.`,
		Example: "  meander runs ls\n  meander runs ls --json",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			list, err := view.Stored(c.Context(), conn.Bus)
			if err != nil {
				return err
			}
			return a.printRuns(c.OutOrStdout(), list)
		}),
	}
}

// printRuns prints a line for each stored run.
func (a *app) printRuns(out io.Writer, list []*view.Run) error {
	if a.json {
		return encode(out, list...)
	}
	t := present.New("RUN", "STATE", "MODEL", "MEAN", "GROUPS", "OPEN", "SAMPLES", "SCORED", "SIZE", "NEWEST", "TAGS")
	for _, r := range list {
		newest := "-"
		if !r.Newest.IsZero() {
			newest = time.Since(r.Newest).Round(time.Second).String() + " ago"
		}
		t.Row(r.Run, r.State+heldText(r.WaitsFor), present.OrDash(r.Model), results.Number(r.Mean, "%.3f"), r.Groups,
			r.Open, r.Samples, r.Scored, present.Size(r.Bytes), newest, strings.Join(r.Tags, ", "))
	}
	t.Print(out)
	return nil
}

// storedRun returns what is stored of a run; nothing is a usage error.
func storedRun(ctx context.Context, b *bus.Bus, name string) (*view.Run, error) {
	if err := schemas.CheckToken("RUN", name); err != nil {
		return nil, usage(err)
	}
	runs, err := view.Count(ctx, b, schemas.Run(name))
	if err != nil {
		return nil, err
	}
	if r := runs[schemas.Run(name)]; r != nil {
		return r, nil
	}
	return nil, fmt.Errorf("run %q: nothing is stored of it; 'meander runs ls' lists the runs that are stored", name)
}

// runsShowCommand makes the command 'meander runs show'.
func runsShowCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "show RUN", Short: "show the settings of a run, the command that makes it again, and what is stored of it",
		Long: `show prints the settings of a run, those that were given and those that came of them, with the command and the
call of Python that make it again. Then it counts the events in each stream. SIZE is an estimate, as in 'meander runs
ls'.`,
		Example: "  meander runs show night",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			r, err := storedRun(c.Context(), conn.Bus, given[0])
			if err == nil {
				err = r.Measure(c.Context(), conn.Bus)
			}
			if err != nil {
				return err
			}
			reader := newReader(c.Context(), conn.Bus, true)
			defer reader.Close()
			settings, err := reader.Settings(c.Context(), r.Run)
			if err != nil && !errors.Is(err, bus.ErrNotFound) {
				return err
			}
			out := c.OutOrStdout()
			if a.json {
				return encode(out, map[string]any{"run": r, "streams": r.Streams(), "settings": settings})
			}
			if err := a.printRuns(out, []*view.Run{r}); err != nil {
				return err
			}
			fmt.Fprintln(out)
			t := present.New("STREAM", "EVENTS")
			streams := r.Streams()
			for _, s := range slices.Sorted(maps.Keys(streams)) {
				t.Row(s, streams[s])
			}
			t.Print(out)
			printSettings(out, settings)
			return nil
		}),
	}
}

// runsRmCommand makes the command 'meander runs rm'.
func runsRmCommand(a *app) *cobra.Command {
	force := false
	c := &cobra.Command{
		Use: "rm RUN ...", Short: "remove runs for ever, with images that no other run uses",
		Long: `rm removes all events of runs. Then it removes images and other blobs that no stored event names and
that are older than two minutes. Dead letters stay. A run with open groups is refused: cancel it first
(meander cancel), or use --force. Do not use the id of a removed run again.`,
		Example: "  meander runs rm night",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			for _, name := range given {
				r, err := storedRun(c.Context(), conn.Bus, name)
				if err != nil {
					return err
				}
				if r.Open > 0 && !force {
					return fmt.Errorf("run %s: %s open; cancel the run first, or use --force", name,
						present.Count(r.Open, "group"))
				}
			}
			for _, name := range given {
				n, err := conn.Purge(c.Context(), schemas.Run(name))
				if err != nil {
					return err
				}
				fmt.Fprintf(c.OutOrStdout(), "run %s: %s removed\n", name, present.Count(n, "event"))
			}
			return sweepBlobs(c, conn)
		}),
	}
	c.Flags().BoolVar(&force, "force", false, "remove runs with open groups too")
	return c
}

// sweepBlobs removes the blobs that no event names, and says how many there were.
func sweepBlobs(c *cobra.Command, conn *connection) error {
	n, err := conn.SweepBlobs(c.Context(), bus.BlobGrace, false)
	if err == nil {
		fmt.Fprintf(c.OutOrStdout(), "%s removed that no event names\n", present.Count(n, "blob"))
	}
	return err
}

type exporter struct {
	*app
	Format   string `key:"format"`
	Out      string `key:"out" help:"new file, - for stdout, or, for datasets, the folder to write; default RUN.tar, RUN"`
	ShardMiB int64  `key:"shard_mib" range:"1..1048576" help:"size in MiB from which on a file of a dataset gets no further group"`
	Push     string `key:"push" help:"also send the dataset to the Hugging Face Hub, ORG/NAME, with a card; --format is parquet then by default; it is private where it is new"`
	Latents  bool   `key:"latents" help:"write the stored latents of images to datasets, too: most of the bytes"`
	MP4      bool   `key:"mp4" help:"write videos as mp4 to webdataset and parquet, too, which takes ffmpeg"`
}

// archiveFormat is the format that import reads; all others are of package export.
const archiveFormat = "archive"

// runsExportCommand makes the command 'meander runs export'.
func runsExportCommand(a *app) *cobra.Command {
	e := &exporter{app: a, Format: archiveFormat, ShardMiB: 256, Latents: true}
	c := &cobra.Command{
		Use: "export RUN", Short: "write a run to files that need no server",
		Long: `export writes a run to files. 'meander runs read' checks them.

archive (default) is one tar file with all events of the run, and the blobs that they name: each event
is STREAM/NUMBER-SUBJECT.msgpack, each blob blobs/<sha-256>; SHA256SUMS has all digests. 'meander runs
import' stores it again. Messages that are no events, which no service reads, are left out by name. A
pass of 'meander rescore' needs the export of the run that it scored, too.

webdataset, parquet and safetensors are datasets of the samples in closed groups: prompt, image or
text, reward, advantage, log-probs and stored latents. They are a folder of files of whole groups, with
their digests in index.json. A later export to the same folder adds the groups that have closed since.

An export that was stopped or killed goes on where it stopped when the same command is given again.`,
		Example: `  meander runs export night --out night.tar
  meander runs export night --format parquet --latents=false --out night
  meander runs export night --push ORG/NAME    # a private data set on the Hugging Face Hub, as Parquet
  meander runs read night`,
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			if err := e.checkPush(c.Flags().Changed("format")); err != nil {
				return err
			}
			if _, err := storedRun(c.Context(), conn.Bus, given[0]); err != nil {
				return err
			}
			if e.Format == archiveFormat {
				for _, flag := range []string{"shard-mib", "latents", "mp4"} {
					if c.Flags().Changed(flag) {
						return usage(fmt.Errorf("--%s: set; must be absent for --format %s, which has all events in "+
							"one file", flag, e.Format))
					}
				}
				return e.writeArchive(c, conn, given[0])
			}
			return e.writeShards(c, conn, given[0])
		}),
	}
	flagsOf(c, e)
	c.Flags().Lookup("format").Usage = archiveFormat + ", " + strings.Join(export.Datasets(), ", ")
	return c
}

// writeArchive writes all events of a run to a new file, which has its name only once it is whole. It goes on with a
// file that was begun.
func (e *exporter) writeArchive(c *cobra.Command, conn *connection, run string) error {
	if e.Out == "-" {
		return e.writeToStdout(c, conn, run)
	}
	name := cmp.Or(e.Out, run+".tar")
	if _, err := os.Lstat(name); err == nil {
		return usage(fmt.Errorf("--out: %q exists already; name another file", name))
	}
	s, err := export.WriteArchiveFile(c.Context(), conn.Bus, schemas.Run(run), name)
	switch {
	case s == nil && errors.Is(err, os.ErrNotExist):
		return usage(fmt.Errorf("--out: %q is in a folder that does not exist; make the folder first", name))
	case err != nil && (s == nil || errors.Is(err, os.ErrPermission) || errors.Is(err, export.ErrBegun)):
		return usage(fmt.Errorf("--out: %w", err))
	case err != nil:
		if _, gone := os.Lstat(name + export.PartEnd); gone != nil {
			return err
		}
		return fmt.Errorf("%w; %s is kept, and the same command goes on with it", err, name+export.PartEnd)
	}
	if s.Before > 0 {
		fmt.Fprintf(c.ErrOrStderr(), "%s: %s were there already, of an export that was stopped\n", name,
			present.Size(s.Before))
	}
	if s.Removed {
		fmt.Fprintf(c.ErrOrStderr(),
			"%s: events of the run were removed since then; it has those that were written before\n", name)
	}
	return e.printArchive(c.OutOrStdout(), name, s)
}

// writeToStdout writes all events of a run to stdout, and what it wrote to stderr.
func (e *exporter) writeToStdout(c *cobra.Command, conn *connection, run string) error {
	if boot.IsTerminal(c.OutOrStdout()) {
		return usage(errors.New("--out: -; must be a file while stdout is a terminal, which shows no tar file"))
	}
	out := bufio.NewWriterSize(asIs(c.OutOrStdout()), 1<<20)
	s, err := export.WriteArchive(c.Context(), conn.Bus, schemas.Run(run), out)
	if err == nil {
		err = out.Flush()
	}
	if err != nil {
		return err
	}
	return e.printArchive(c.ErrOrStderr(), "stdout", s)
}

// writeShards writes the samples of a run as a dataset.
func (e *exporter) writeShards(c *cobra.Command, conn *connection, run string) error {
	switch {
	case !slices.Contains(export.Datasets(), e.Format):
		return usage(fmt.Errorf("--format: %q; must be one of %s, %s", e.Format, archiveFormat,
			strings.Join(export.Datasets(), ", ")))
	case e.Out == "-":
		return usage(errors.New("--out: -; must be a folder for a dataset; only an archive goes to stdout"))
	case e.MP4 && e.Format == "safetensors":
		return usage(errors.New("--mp4: set; must be absent for --format safetensors, which has pixels"))
	}
	if _, err := media.FFmpeg(); e.MP4 && err != nil {
		return usage(fmt.Errorf("--mp4: %w", err))
	}
	folder := cmp.Or(e.Out, run)
	x, err := export.WriteDataset(c.Context(), conn.Bus, schemas.Run(run), export.DatasetOptions{
		Format: e.Format, Folder: folder, Bytes: e.ShardMiB << 20, Latents: e.Latents, MP4: e.MP4,
		Written: func(s export.Shard) {
			fmt.Fprintf(c.ErrOrStderr(), "%s: %s, %s, %s\n", filepath.Join(folder, s.File),
				present.Count(s.Groups, "group"), present.Count(s.Samples, "sample"), present.Size(s.Bytes))
		},
	})
	if errors.Is(err, export.ErrBegun) || errors.Is(err, export.ErrChanged) {
		return usage(fmt.Errorf("--out: %w", err))
	}
	if err != nil {
		return err
	}
	if err := e.printShards(c.OutOrStdout(), folder, x); err != nil || e.Push == "" {
		return err
	}
	return e.pushShards(c, conn, folder, x)
}

// printShards prints what a dataset has.
func (a *app) printShards(out io.Writer, folder string, x *export.Index) error {
	if a.json {
		return encode(out, x)
	}
	t := x.Totals()
	fmt.Fprintf(out, "%s: %s of %s as %s, %s in %s, %s\n", folder, present.Count(t.Groups, "group"), x.Run, x.Format,
		present.Count(t.Samples, "sample"), present.Count(len(x.Shards), "file"), present.Size(t.Bytes))
	if t.LeftOut > 0 {
		fmt.Fprintf(out, "  %s left out: not completed, or no longer stored; --latents=false exports those of which "+
			"only steps were freed\n", present.Count(t.LeftOut, "sample"))
	}
	return nil
}

// runsReadCommand makes the command 'meander runs read'.
func runsReadCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "read FILE|-", Short: "check an exported run and count what it has; needs no server",
		Long: `read compares every file of an export with its digest in SHA256SUMS, events with their schemas, steps
with the digests in their trajectories, and tensors with the digests of their parts. Of the folder of a
dataset it compares the files with their digests in index.json. If a file has changed or is not valid,
read names it and the exit status is 1. What is no longer stored since before the export is named, and
no fault.`,
		Example: "  meander runs read night.tar\n  ssh gpu-1 cat night.tar | meander runs read -",
		RunE: func(c *cobra.Command, given []string) error {
			if isFolder(given[0]) {
				x, err := export.CheckDataset(given[0])
				if errors.Is(err, os.ErrNotExist) {
					return fmt.Errorf("%w; must be the folder of a dataset that is whole, or the file of an archive",
						err)
				}
				if err != nil {
					return err
				}
				return a.printShards(c.OutOrStdout(), given[0], x)
			}
			f := os.Stdin
			if given[0] != "-" {
				var err error
				if f, err = os.Open(given[0]); err != nil {
					return err
				}
				defer func() { _ = f.Close() }() // read-only
			}
			s, err := export.CheckArchive(f, func(e *export.Entry) error {
				if !a.json || e.Blob != "" {
					return nil
				}
				return encode(c.OutOrStdout(), map[string]any{
					"stream": e.Stream, "seq": e.Seq, "subject": e.Subject, "time": e.Time.UTC(),
					"event": schemas.JSONOfBytes(e.Data),
				})
			})
			if err != nil {
				return err
			}
			if a.json {
				printWarnings(c.ErrOrStderr(), s)
				return nil
			}
			return a.printArchive(c.OutOrStdout(), given[0], s)
		},
	}
}

// runsImportCommand makes the command 'meander runs import'.
func runsImportCommand(a *app) *cobra.Command {
	o := export.ImportOptions{}
	c := &cobra.Command{
		Use: "import FILE", Short: "store an exported run again",
		Long: `import checks an export like 'meander runs read', then stores its events and blobs. All digests stay
the same; events get new sequence numbers and the time of the import. A second import changes nothing,
and an import that was stopped continues. If the store has events of the run that the export does not
have, import refuses and writes nothing.

A pass of 'meander rescore' names the samples of the run that it scored: import an export of that run
first, or, where there is none, give --without-source.

No service may run on the store: stop 'meander up' first. When it starts again, it continues the open
groups.`,
		Example: "  meander runs import night.tar\n  meander runs import night.tar --store other",
		RunE: func(c *cobra.Command, given []string) error {
			if isFolder(given[0]) {
				return usage(fmt.Errorf("FILE: %q is a folder; must be the file of an archive: datasets cannot be "+
					"imported", given[0]))
			}
			f, err := os.Open(given[0])
			if err != nil {
				return err
			}
			defer func() { _ = f.Close() }() // read-only
			if _, err := f.Seek(0, io.SeekCurrent); err != nil {
				return usage(fmt.Errorf("FILE: %q is no file; must be one: all of it is checked before anything is "+
					"stored", given[0]))
			}
			return a.withConnection(a.connect, func(c *cobra.Command, conn *connection, _ []string) error {
				return a.importRun(c, conn, f, o)
			})(c, given)
		},
	}
	c.Flags().BoolVar(&o.WithoutSource, "without-source", false,
		"store a pass also where the run that it scored is not stored: its rewards then name no samples")
	return c
}

func isFolder(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.IsDir()
}

// importRun stores an exported run. It refuses while a service runs, which would work on a part of the run, and if the
// store has other events of the run.
func (a *app) importRun(c *cobra.Command, conn *connection, f io.ReadSeeker, o export.ImportOptions) error {
	running, err := conn.Present(c.Context())
	if err != nil {
		return err
	}
	if len(running) > 0 {
		p := running[0]
		return fmt.Errorf("%s %s runs on this store and would work on a run that is only partly there; "+
			"stop it first (a killed one counts as running for %v)", p.Service, p.Instance, schemas.PresenceTTL)
	}
	done, err := export.Import(c.Context(), conn.Bus, f, o)
	if errors.Is(err, export.ErrNoSource) {
		err = fmt.Errorf("%w, or, where there is none, give --without-source", err)
	}
	if err != nil {
		return withAdvice(c.Context(), conn.Bus, err)
	}
	if a.json {
		return encode(c.OutOrStdout(), done)
	}
	fmt.Fprintf(c.OutOrStdout(), "run %s: %s stored, %s there already, %s\n",
		done.Run, present.Count(done.Stored, "event"), present.Count(done.AlreadyStored, "event"),
		present.Count(done.Blobs, "blob"))
	printWarnings(c.OutOrStdout(), done.Summary)
	return nil
}

// printWarnings prints what an export does not have, what it has in vain, and of which run it is a pass.
func printWarnings(out io.Writer, s *export.Summary) {
	when, count := present.When, present.Count[int]
	fmt.Fprint(out, when(s.SourceRun != "", "  a pass over run %s, which has the samples\n", s.SourceRun),
		when(s.MissingTrajectories > 0, "  the trajectories of %s missing: no longer stored\n",
			count(s.MissingTrajectories, "sample")),
		when(s.FreedSteps > 0, "  %s missing: freed once all had read them\n", count(s.FreedSteps, "step")),
		when(s.Missing > 0, "  %s missing: no longer stored at the time of the export\n", count(s.Missing, "blob")),
		when(s.Refused > 0, "  prompts or controls that the services refuse: %d\n", s.Refused),
		when(s.LeftOut > 0, "  %s left out: no service reads them, for they are no valid events\n",
			count(s.LeftOut, "message")))
	for _, note := range s.Notes {
		fmt.Fprintf(out, "    %s\n", note)
	}
}

// printArchive prints how many events and blobs an export has; name is its file.
func (a *app) printArchive(out io.Writer, name string, s *export.Summary) error {
	if a.json {
		return encode(out, s)
	}
	n := 0
	for _, k := range s.Events {
		n += k
	}
	fmt.Fprintf(out, "%s: %s and %s of %s\n", name, present.Count(n, "event"), present.Count(s.Blobs, "blob"),
		present.Size(s.Bytes))
	for _, stream := range slices.Sorted(maps.Keys(s.Events)) {
		fmt.Fprintf(out, "  %-18s %8d\n", stream, s.Events[stream])
	}
	printWarnings(out, s)
	return nil
}
