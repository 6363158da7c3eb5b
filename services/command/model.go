package command

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	languages "github.com/meander-rl/meander/pkg/lm/families"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/families"
	"github.com/meander-rl/meander/services/sampler"
)

func modelCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "model", Short: "look at model folders", Args: args(noSuchCommand),
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(&cobra.Command{
		Use:   "info DIR",
		Short: "family, parameters, dtypes, memory, and what is missing or unsupported",
		Long: `info reads the configurations and tensor headers of a folder in the diffusers layout, or of a
language model in that of transformers, not the weights, and says whether meander can run it.
Exit status 1 when it cannot.`,
		Example: `  meander model info deploy/models/signs
  meander model info sums                # a language model
  meander model info signs --json`,
		Args: args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, given []string) error {
			dir, family, err := families.All().Find(given[0])
			if errors.Is(err, model.ErrUnknown) {
				dir, family, found := languages.All().Find(given[0])
				if found == nil {
					return languageInfo(c, dir, family, a.json)
				}
				err = sampler.Unknown(err, found)
			}
			if err != nil {
				return usage(err)
			}
			info, err := family.Inspect(dir)
			if err != nil {
				return usage(err)
			}
			if info.SchedulerConfig != nil {
				if err := sampler.CheckSchedule(info.SchedulerConfig); err != nil {
					info.Problems = append(info.Problems, strings.Split(err.Error(), "\n")...)
				}
			}
			return showInfo(c, a.json, info.Problems, infoJSON(info), func() error { return printInfo(c.OutOrStdout(), dir, info) })
		},
	})
	return c
}

// showInfo prints a description, with its problems, which say whether the model loads.
func showInfo(c *cobra.Command, asJSON bool, problems []string, fields map[string]any, print func() error) error {
	out := c.OutOrStdout()
	if asJSON {
		fields["problems"], fields["loads"] = append([]string{}, problems...), len(problems) == 0
		if err := json.NewEncoder(out).Encode(fields); err != nil {
			return err
		}
	} else {
		if err := print(); err != nil {
			return err
		}
		if len(problems) == 0 {
			fmt.Fprintln(out, "loads: yes")
		} else {
			fmt.Fprintf(out, "loads: no, %d problems\n", len(problems))
		}
		for _, p := range problems {
			fmt.Fprintf(out, "  %s\n", p)
		}
	}
	if len(problems) > 0 {
		return &exitError{status: exitFailed}
	}
	return nil
}

func printParts(out io.Writer, name, family, dir string, parts []model.PartInfo) error {
	t := newColumns(out)
	fmt.Fprintf(t, "%s (%s), %s\n\nPART\tCLASS\tPARAMETERS\tDTYPES\tFILES\tIN MEMORY\n", name, family, dir)
	parameters, files, memory := 0, 0, 0
	for _, p := range parts {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", p.Name, p.Class, thousands(p.Parameters), strings.Join(p.DTypes, " "), size(int64(p.FileBytes)), size(int64(p.MemoryBytes)))
		parameters, files, memory = parameters+p.Parameters, files+p.FileBytes, memory+p.MemoryBytes
	}
	fmt.Fprintf(t, "all\t\t%s\t\t%s\t%s\n", thousands(parameters), size(int64(files)), size(int64(memory)))
	return t.Flush()
}

func printInfo(out io.Writer, dir string, info *model.Info) error {
	if err := printParts(out, info.Name, info.Family, dir, info.Parts); err != nil {
		return err
	}
	if err := printGPUMemory(out, info); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nvocabulary %d, %d latent channels per token of %dx%d pixels\ndefaults %dx%d pixels, %d steps, true_cfg_scale %g, negative prompt %q\n",
		info.Vocabulary, info.LatentChannels, info.PixelsPerToken, info.PixelsPerToken, info.Height, info.Width, info.NumInferenceSteps, info.TrueCFGScale, info.NegativePrompt)
	fmt.Fprintf(out, "guidance %s, conditioning %s\n", info.CFGRule, strings.Join(info.Conditioning, ", "))
	printReward(out, info.Reward)
	return nil
}

func printReward(out io.Writer, names []string) {
	if len(names) > 0 {
		fmt.Fprintf(out, "reward %s\n", strings.Join(names, ", "))
	}
}

// printGPUMemory says what a GPU must have: weights as bf16 or float32, and the most that a
// pass takes beside them, for images of some sizes with guidance.
func printGPUMemory(out io.Writer, info *model.Info) error {
	if info.Pass == nil {
		return nil
	}
	t := newColumns(out)
	fmt.Fprintf(t, "\nON A GPU\tBF16\tFLOAT32\n")
	var weights, text [2]int
	for _, p := range info.Parts {
		weights[0], weights[1] = weights[0]+p.FactorBytes, weights[1]+p.MemoryBytes
		if p.Name == info.Parts[0].Name {
			text = weights
		}
	}
	fmt.Fprintf(t, "weights\t%s\t%s\n", size(int64(weights[0])), size(int64(weights[1])))
	fmt.Fprintf(t, "without %s, which can go to the processor\t%s\t%s\n", info.Parts[0].Name, size(int64(weights[0]-text[0])), size(int64(weights[1]-text[1])))
	sizes := [][2]int{{512, 512}, {1024, 1024}, {1328, 1328}}
	if !slices.Contains(sizes, [2]int{info.Height, info.Width}) {
		sizes = append([][2]int{{info.Height, info.Width}}, sizes...)
	}
	for _, s := range sizes {
		if _, err := info.Tokens(s[0], s[1]); err != nil {
			continue
		}
		for _, images := range []int{1, 4, 8} {
			fmt.Fprintf(t, "and a pass of %d at %dx%d, guided\t%s\t%s\n", images, s[0], s[1],
				size(int64(info.Pass(s[0], s[1], 2*images, 2))), size(int64(info.Pass(s[0], s[1], 2*images, 4))))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	one := weights[0] + info.Pass(info.Height, info.Width, 2, 2)
	_, err := fmt.Fprintf(out, "in bf16, %s for one image of %dx%d: %s\n", size(int64(one)), info.Height, info.Width, leastGPU(one))
	return err
}

// leastGPU names the smallest usual GPU with so many bytes to spare; a twentieth of one is
// the driver's and the kernels'.
func leastGPU(bytes int) string {
	for _, gib := range []int{8, 16, 24, 40, 48, 80, 141, 180} {
		if bytes <= gib<<30/20*19 {
			return fmt.Sprintf("fits one GPU of %d GB", gib)
		}
	}
	return "no usual GPU has as much"
}

func partsJSON(list []model.PartInfo) []map[string]any {
	parts := make([]map[string]any, len(list))
	for i, p := range list {
		parts[i] = map[string]any{
			"name": p.Name, "class": p.Class, "parameters": p.Parameters, "dtypes": p.DTypes,
			"files": p.Files, "file_bytes": p.FileBytes, "memory_bytes": p.MemoryBytes, "memory_bytes_bf16": p.FactorBytes,
		}
	}
	return parts
}

func infoJSON(info *model.Info) map[string]any {
	return map[string]any{
		"name": info.Name, "family": info.Family, "parts": partsJSON(info.Parts), "vocabulary": info.Vocabulary,
		"latent_channels": info.LatentChannels, "pixels_per_token": info.PixelsPerToken, "height": info.Height, "width": info.Width,
		"num_inference_steps": info.NumInferenceSteps, "true_cfg_scale": info.TrueCFGScale, "negative_prompt": info.NegativePrompt,
		"cfg_rule": info.CFGRule, "conditioning": info.Conditioning,
	}
}

// thousands groups digits: 1,234,567.
func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
