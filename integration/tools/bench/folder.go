package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
)

func benchFolderCommand() *cobra.Command {
	var r checkpoint.Changes
	c := &cobra.Command{
		Use:   "folder DIR",
		Short: "write a model folder of a published size with random weights",
		Long: `folder writes a checkpoint with the layout, names, shapes and types of a family's published
one and random weights, so that a machine can be measured without a download. Its images
mean nothing. Whole, one of 27 billion parameters takes 56 GB on disk; fewer layers take less
and measure the same per layer. No tensor is held in memory as a whole.`,
		Example: `  bench folder /data/random
  bench folder --layers 4 --text-layers 1 --vocabulary 300 /tmp/random-4
  meander model info /tmp/random-4`,
		Args: func(c *cobra.Command, args []string) error { return usage(cobra.ExactArgs(1)(c, args)) },
		RunE: func(c *cobra.Command, args []string) error {
			var faults []error
			for _, f := range []struct {
				name     string
				v, limit int
			}{
				{"layers", r.Layers, 1024},
				{"text-layers", r.TextLayers, 1024},
				{"vocabulary", r.Vocabulary, 1 << 20},
				{"size", r.Size, 4096},
			} {
				if f.v < 0 || f.v > f.limit {
					faults = append(faults,
						fmt.Errorf("--%s: %d; must be between 1 and %d, or 0 for the published one", f.name, f.v,
							f.limit))
				}
			}
			if err := errors.Join(faults...); err != nil {
				return usage(err)
			}
			if _, err := os.Stat(args[0]); !errors.Is(err, os.ErrNotExist) {
				return usage(fmt.Errorf("folder %q: is there; must be a new one", args[0]))
			}
			r.Progress = func(file string, bytes int) {
				fmt.Fprintf(c.ErrOrStderr(), "%s, %.1f GB\n", file, float64(bytes)/1e9)
			}
			return checkpoint.WritePublished(args[0], r)
		},
	}
	f := c.Flags()
	f.IntVar(&r.Layers, "layers", 0, "blocks of the transformer; default as published, as for all below")
	f.IntVar(&r.TextLayers, "text-layers", 0, "layers of the text encoder")
	f.IntVar(&r.Vocabulary, "vocabulary", 0, "rows of the text encoder's embedding")
	f.IntVar(&r.Size, "size", 0, "height and width of images where a prompt names none, in pixels")
	f.Uint64Var(&r.Seed, "seed", 0, "of the weights")
	f.BoolVar(&r.Hollow, "hollow", false, "leave large tensors out of the files: zeros that take no disk")
	return c
}
