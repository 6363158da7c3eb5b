package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/sampler/models"
)

// fetch downloads what the cache lacks of a model and an adapter of the Hugging Face Hub, and shows it. What the Hub
// does not give is a usage error.
func (a *app) fetch(ctx context.Context, name, adapter string, want hub.Want) error {
	err := models.Fetch(ctx, name, adapter, want, a.newDownload().watcher())
	if errors.Is(err, hub.ErrName) {
		return usage(fmt.Errorf("--%w", err))
	}
	return err
}

// fetchPrompts downloads a file of prompts of the Hugging Face Hub, hf://datasets/ORG/NAME/FILE, and has d read it. Any
// other file stays.
func (a *app) fetchPrompts(ctx context.Context, d *datasetFlags) error {
	if !strings.HasPrefix(d.File, "hf://") {
		return nil
	}
	path, source, err := hub.FetchFile(ctx, d.File, a.newDownload().watcher())
	if _, wrong := hub.ParseDataset(d.File); wrong != nil || errors.Is(err, hub.ErrName) {
		return usage(fmt.Errorf("--prompts: %w", err))
	}
	if err != nil {
		return fmt.Errorf("--prompts: %w", err)
	}
	d.File, d.source = path, source
	return nil
}

// fetchOwn is fetch for the model and the adapter that the services of this process serve.
func (a *app) fetchOwn(ctx context.Context, s *services) error {
	return a.fetch(ctx, s.Sampler.Model, s.Sampler.Adapter, models.Wanted(s.Sampler.Engine))
}

// fetchCommand makes the command 'meander model fetch'.
func fetchCommand(a *app) *cobra.Command {
	adapter := false
	c := &cobra.Command{
		Use:   "fetch ORG/NAME[@REVISION]",
		Short: "download a model of the Hugging Face Hub, or bring it up to date, and print its folder",
		Long: `fetch downloads the files of a model that meander reads: what describes it, and weights in
safetensors. They go into the cache that diffusers and transformers have, too. Commands with --model do
the same where the cache lacks something; fetch also asks whether the branch has a newer commit.

A download that was cut off goes on where it stopped. Each file is checked against its checksum. The
variables of Hugging Face count: HF_TOKEN or 'hf auth login' for gated and private models, HF_HOME or
HF_HUB_CACHE for the folder, HF_ENDPOINT for a mirror, HF_HUB_OFFLINE=1 to use the cache alone.`,
		Example: `  meander model fetch ORG/NAME
  meander model fetch ORG/NAME@REVISION    # a branch, a tag or a commit
  meander model fetch ORG/NAME --adapter   # a LoRA, for --adapter`,
		RunE: func(c *cobra.Command, given []string) error {
			want := hub.Model
			if adapter {
				want = hub.Adapter
			}
			if _, ok := hub.Parse(given[0]); !ok {
				hint := hub.Misspelt(given[0])
				return usage(fmt.Errorf("%q: must be ORG/NAME or ORG/NAME@REVISION of the Hugging Face Hub%s", given[0],
					present.When(hint != "", "; %s", hint)))
			}
			dir, err := hub.Update(c.Context(), given[0], want, a.newDownload().watcher())
			if errors.Is(err, hub.ErrName) {
				return usage(err)
			}
			if err != nil {
				return err
			}
			if a.json {
				return encode(c.OutOrStdout(), map[string]string{"folder": dir, "source": hub.Source(dir)})
			}
			fmt.Fprintln(c.OutOrStdout(), dir)
			return nil
		},
	}
	c.Flags().BoolVar(&adapter, "adapter", false, "it is a LoRA")
	return c
}

// checkPush checks --push before anything is written: it is for datasets.
func (e *exporter) checkPush(formatGiven bool) error {
	if e.Push == "" {
		return nil
	}
	if !formatGiven {
		e.Format = "parquet"
	}
	if e.Format == archiveFormat {
		return usage(fmt.Errorf("--format: %q with --push; must be one of %s", e.Format,
			strings.Join(export.Datasets(), ", ")))
	}
	if err := hub.CheckPush(e.Push); err != nil {
		return usage(fmt.Errorf("--push: %w", err))
	}
	return nil
}

// pushShards writes the card of a dataset beside its files, and sends all to the Hub.
func (e *exporter) pushShards(c *cobra.Command, conn *connection, folder string, x *export.Index) error {
	reader := newReader(c.Context(), conn.Bus, true)
	defer reader.Close()
	settings, err := reader.Settings(c.Context(), x.Run)
	if err != nil && !errors.Is(err, bus.ErrNotFound) {
		return err
	}
	card := filepath.Join(folder, export.CardFile)
	if err := os.WriteFile(card, []byte(export.Card(x, settings, boot.Version())), 0o644); err != nil {
		return err
	}
	files := []hub.Upload{}
	for _, s := range x.Shards {
		files = append(files, hub.Upload{Name: s.File, Path: filepath.Join(folder, s.File)})
	}
	for _, name := range []string{export.IndexFile, export.CardFile} {
		files = append(files, hub.Upload{Name: name, Path: filepath.Join(folder, name)})
	}
	d := e.newDownload()
	d.sends = true
	commit, err := hub.Push(c.Context(), e.Push, fmt.Sprintf("run %s", x.Run), files, d.watcher())
	if errors.Is(err, hub.ErrName) {
		return usage(fmt.Errorf("--push: %w", err))
	}
	if err != nil {
		return fmt.Errorf("--push: %w; the dataset is in %s, and the same command sends what is missing", err, folder)
	}
	fmt.Fprintf(c.ErrOrStderr(), "%s is on the Hugging Face Hub: %s\n", e.Push, commit)
	return nil
}

// downloading shows a download, or that something is sent: what and how much before it begins, then how far it is.
type downloading struct {
	meter
	machine, sends bool
	plan           hub.Plan
	// came is what this process has downloaded. The bar reads it while it draws.
	came  atomic.Int64
	began time.Time
}

func (a *app) newDownload() *downloading {
	return &downloading{meter: meter{out: a.stderr}, machine: a.json}
}

// speed is the mean of this download, for the bar.
func (d *downloading) speed(decor.Statistics) string {
	seconds := max(1, time.Since(d.began).Seconds())
	return present.Size(int(float64(d.came.Load())/seconds)) + "/s"
}

func (d *downloading) watcher() hub.Watcher {
	return hub.Watcher{Plan: d.begin, Got: d.got, Say: d.note, End: d.end}
}

func (d *downloading) word() string {
	if d.sends {
		return "upload"
	}
	return "download"
}

// begin says what is about to come, and shows how far it is.
func (d *downloading) begin(p hub.Plan) {
	d.plan, d.began = p, time.Now()
	d.came.Store(0)
	d.note(fmt.Sprintf("%sing %s: %s, %s, to %s%s", d.word(), p.Name, present.Count(p.Files, "file"),
		present.Size(p.Bytes), p.To, present.When(p.Have > 0, "; %s are there already", present.Size(p.Have))))
	d.start(d.machine, int(p.Bytes), func() string {
		done := present.Size(d.plan.Have + d.came.Load())
		return fmt.Sprintf("%sed %s of %s", d.word(), done, present.Size(d.plan.Bytes))
	}, mpb.AppendDecorators(decor.CountersKibiByte("% .1f of % .1f"), decor.Name("  "), decor.Any(d.speed),
		decor.Name("  "), decor.Elapsed(decor.ET_STYLE_MMSS)))
	d.add(int(p.Have))
}

func (d *downloading) got(n int64) {
	d.came.Add(n)
	d.add(int(n))
}

func (d *downloading) end(err error) {
	d.close(err == nil)
	d.meter = meter{out: d.out}
}
