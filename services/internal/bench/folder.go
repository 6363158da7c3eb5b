package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/services/internal/boot"
)

func benchFolderCommand() *cobra.Command {
	config := checkpoint.Published()
	c := &cobra.Command{
		Use:   "folder DIR",
		Short: "write a model folder of Qwen-Image's size with random weights",
		Long: `folder writes a checkpoint with the layout, names, shapes and types of the published
Qwen-Image and random weights, so that a machine can be measured without a download. Its
images mean nothing. Whole, it takes 58 GB on disk; fewer layers take less and measure the
same per layer. No tensor is held in memory as a whole.`,
		Example: `  bench folder /data/qwen-random
  bench folder --layers 4 --text-layers 1 --vocabulary 300 /tmp/qwen-4
  meander model info /tmp/qwen-4`,
		Args: func(c *cobra.Command, args []string) error { return boot.Usage(cobra.ExactArgs(1)(c, args)) },
		RunE: func(c *cobra.Command, args []string) error {
			var faults []error
			for _, f := range []struct {
				name     string
				v, limit int
			}{{"layers", config.Depth, 1024}, {"text-layers", config.TextDepth, 1024}, {"vocabulary", config.Vocabulary, 1 << 20}, {"size", config.Height, 4096}} {
				if f.v < 1 || f.v > f.limit {
					faults = append(faults, fmt.Errorf("--%s: %d; must be between 1 and %d", f.name, f.v, f.limit))
				}
			}
			if err := errors.Join(faults...); err != nil {
				return boot.Usage(err)
			}
			if _, err := os.Stat(args[0]); !errors.Is(err, os.ErrNotExist) {
				return boot.Usage(fmt.Errorf("folder %q: is there; must be a new one", args[0]))
			}
			config.Width = config.Height
			config.Progress = func(file string, bytes int) {
				fmt.Fprintf(c.ErrOrStderr(), "%s, %.1f GB\n", file, float64(bytes)/1e9)
			}
			return checkpoint.Write(args[0], config)
		},
	}
	f := c.Flags()
	f.IntVar(&config.Depth, "layers", config.Depth, "blocks of the transformer")
	f.IntVar(&config.TextDepth, "text-layers", config.TextDepth, "layers of the text encoder")
	f.IntVar(&config.Vocabulary, "vocabulary", config.Vocabulary, "rows of the text encoder's embedding")
	f.IntVar(&config.Height, "size", config.Height, "height and width of images where a prompt names none, in pixels")
	f.Uint64Var(&config.Seed, "seed", 0, "of the weights")
	f.BoolVar(&config.Hollow, "hollow", false, "leave large tensors out of the files: zeros that take no disk")
	return c
}
