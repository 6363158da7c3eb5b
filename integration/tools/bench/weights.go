package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
)

// weightsBench is one `bench weights` command.
type weightsBench struct {
	bin, ways string
	gb        float64
	pushOnly  bool

	*plane
	client *client.Client
	folder string // of models and the shared folder
}

// Ways of weights from who pushes to the samplers.
const (
	wayInPlace = "path"
	wayCopied  = "copy"
	wayServer  = "server"
)

func benchWeightsCommand() *cobra.Command {
	b := weightsBench{}
	c := &cobra.Command{
		Use:   "weights",
		Short: "whole transformers by path and through the server: time, and memory of both sides",
		Long: `weights writes sparse checkpoints of a size, which need no disk, and pushes them to a sampler as programs
do: by path from the shared folder (path), by path from elsewhere, which copies them to the shared folder
(copy), and through the server (server). Copies and the server take the size on disk, until the end. It
reads the memory of both programs from the kernel. The report is Markdown.`,
		Example: `  bench weights --gb 2
  bench weights --gb 10 --ways path --push-only    # no sampler: it would need the memory of two transformers`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ways := strings.Split(b.ways, ",")
			for _, way := range ways {
				if !slices.Contains([]string{wayInPlace, wayCopied, wayServer}, way) {
					return usage(fmt.Errorf("--ways: %q; must be of path, copy and server", way))
				}
			}
			if b.gb < 0.1 || b.gb > 100 {
				return usage(fmt.Errorf("--gb: %g; must be between 0.1 and 100", b.gb))
			}
			fmt.Fprintf(c.OutOrStdout(), "%s\n", machine())
			return withPlane(c.Context(), c.ErrOrStderr(), func(p *plane) error {
				b.plane, b.client, b.folder = p, client.New(p.bus), filepath.Join(p.store, "weights")
				return b.run(c.Context(), c.OutOrStdout(), ways)
			})
		},
	}
	f := c.Flags()
	f.StringVar(&b.bin, "bin", "bin", "folder of the programs meander and meander-sampler")
	f.StringVar(&b.ways, "ways", "path,copy", "of path, copy and server, with commas")
	f.Float64Var(&b.gb, "gb", 2, "size of the transformer in 10^9 bytes, about")
	f.BoolVar(&b.pushOnly, "push-only", false, "no sampler takes them over")
	return c
}

// transformer writes a checkpoint and returns the folder of its transformer, and its bytes.
func (b *weightsBench) transformer(name string, seed uint64) (folder string, size int64, err error) {
	const block = 36 * 1024 * 1024 * 4 // bytes
	folder = filepath.Join(b.folder, name)
	err = checkpoint.Write(folder, checkpoint.Config{
		Seed: seed, DType: tensor.F32, Heads: 8, HeadDim: 128, Depth: max(1, int(b.gb*1e9/block)), ShardBytes: 1 << 30,
		Hollow: true,
	})
	folder = filepath.Join(folder, "transformer")
	files, globErr := filepath.Glob(filepath.Join(folder, "*.safetensors"))
	err = errors.Join(err, globErr)
	for _, file := range files {
		info, statErr := os.Stat(file)
		if err = errors.Join(err, statErr); statErr == nil {
			size += info.Size()
		}
	}
	return folder, size, err
}

// start starts a program of the folder --bin.
func (b *weightsBench) start(ctx context.Context, name string, args ...string) (*measured, error) {
	m := newMeasured(ctx, b.bin, name, args...)
	return m, m.start()
}

func (b *weightsBench) run(ctx context.Context, out io.Writer, ways []string) error {
	base, size, err := b.transformer("base", 1)
	shared := filepath.Join(b.folder, "shared")
	if err = errors.Join(err, os.MkdirAll(shared, 0o755)); err != nil {
		return err
	}
	var sampler *measured
	if b.pushOnly {
		err = b.announce(ctx, base)
	} else if sampler, err = b.start(ctx, "meander-sampler", "--nats-url", b.server.ClientURL(), "--health-addr", "",
		"--lane", "bench",
		"--model", filepath.Dir(base), "--weights-dir", shared, "--workers", "1"); err == nil {
		defer func() { _ = sampler.Process.Kill() }()
	}
	if err != nil {
		return err
	}
	if err := poll(ctx, 20*time.Millisecond, func() (bool, error) {
		_, err := b.client.Policy(ctx, schemas.Lane("bench").Of(""))
		return err == nil, nil
	}); err != nil {
		return err
	}
	heading(out, "Whole transformers")
	fmt.Fprintf(out,
		"A transformer of %.1f GB in float32, in files of 1 GB at most. Peaks in MB: all, and of it what is not of "+
			"files, which the system cannot take back.\n\n| way | stored, s | taken over, s | pushing: all | not "+
			"of files | sampler before: not of files | "+
			"sampler: all | not of files |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n", float64(size)/1e9)
	for i, way := range ways {
		if err := b.push(ctx, out, way, uint64(i+2), shared, sampler); err != nil {
			return err
		}
	}
	return nil
}

// announce makes a lane that nothing serves, which takes transformers of the shapes of base.
func (b *weightsBench) announce(ctx context.Context, base string) error {
	full, err := lora.OpenFull(base)
	if err != nil {
		return err
	}
	table, err := full.Shapes().Encode()
	if err = errors.Join(err, full.Close()); err != nil {
		return err
	}
	ref, err := b.bus.PutBlob(ctx, table)
	if err != nil {
		return err
	}
	return b.bus.SetPolicy(ctx, &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "bench", Model: "bench", Family: "bench", WeightsDigest: "base", BaseDigest: "base", Tensors: &ref,
		LatentChannels: 64, PixelsPerToken: 16,
		Height: 64, Width: 64, NumInferenceSteps: 4, TrueCFGScale: 1, MaxPixels: 1 << 20,
		Announced: time.Now().UnixNano(),
	}, nil)
}

// push pushes another transformer and writes a line of the report. Its files go at the end.
func (b *weightsBench) push(
	ctx context.Context, out io.Writer, way string, seed uint64, shared string, sampler *measured,
) (err error) {
	name := way
	if way == wayInPlace {
		name = filepath.Join("shared", way)
	}
	folder, _, err := b.transformer(name, seed)
	defer func() { err = errors.Join(err, os.RemoveAll(filepath.Dir(folder))) }()
	if err != nil {
		return err
	}
	args := []string{
		"policy", "push", "--nats", b.server.ClientURL(), "--full", folder, "--lane", "bench", "--wait",
		"0", "--json",
	}
	if way != wayServer {
		args = append(args, "--weights-dir", shared)
	}
	before := -1
	var both []*measured
	if sampler != nil {
		sampler.look()
		before = sampler.anonymous
		sampler.reset()
		both = append(both, sampler)
	}
	began := time.Now()
	pusher, err := b.start(ctx, "meander", args...)
	if err == nil {
		err = pusher.finish(both...)
	}
	stored, taken := time.Since(began), "-"
	if err != nil {
		return err
	}
	if sampler != nil {
		p, err := b.client.NewestPolicy(ctx, schemas.Lane("bench").Of(""))
		if err != nil {
			return err
		}
		var replicas []client.Replica
		if err := poll(ctx, 5*time.Millisecond, func() (bool, error) {
			sampler.look()
			replicas, err = b.client.Replicas(ctx, p)
			return len(replicas) > 0 && replicas[0].Answer != nil, err
		}); err != nil {
			return err
		}
		if a := replicas[0].Answer; a.State != schemas.AppliedApplied {
			return fmt.Errorf("the sampler refused it: %s", a.Error)
		}
		taken = fmt.Sprintf("%.1f", time.Since(began).Seconds())
	}
	all, anonymous := -1, -1
	if sampler != nil {
		all, anonymous = sampler.peak, sampler.anonymous
	}
	fmt.Fprintf(out, "| %s | %.1f | %s | %s | %s | %s | %s | %s |\n", way, stored.Seconds(), taken, inMB(pusher.peak),
		inMB(pusher.anonymous), inMB(before), inMB(all), inMB(anonymous))
	return nil
}
