package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/lm"
	languages "github.com/meander-rl/meander/pkg/models/lm/families"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/services/internal/present"
	imageengine "github.com/meander-rl/meander/services/sampler/engine/images"
	textengine "github.com/meander-rl/meander/services/sampler/engine/texts"
	"github.com/meander-rl/meander/services/sampler/models"
)

// modelCommand makes the command 'meander model', with its subcommand info.
func modelCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "model", Short: "look at model folders, and fetch models of the Hugging Face Hub",
		Example: "  meander model info signs\n  meander model fetch ORG/NAME",
	}
	engine, test := "", false
	var options models.TorchOptions
	info := &cobra.Command{
		Use:   "info DIR",
		Short: "show family, parameters, dtypes and memory of a model, and what meander cannot run",
		Long: `info reads the configuration files and tensor headers of a folder in the diffusers layout, or of a
language model in the transformers layout. It does not read the weights. It says whether meander can
run the model.

With --engine torch it asks a worker, which knows more classes. With --test that reads the weights,
and tests the pipeline as before it serves it.

Exit status: 0 it can, 1 it cannot.`,
		Example: `  meander model info deploy/models/signs
  meander model info sums                # a language model
  meander model info ORG/NAME            # of the Hugging Face Hub; downloaded once
  meander model info signs --json
  meander model info --engine torch --test ./kontext`,
		RunE: func(c *cobra.Command, given []string) error {
			if err := a.fetch(c.Context(), given[0], "", hub.Model); err != nil {
				return err
			}
			if test && engine == "" {
				return usage(errors.New("--test: needs --engine torch: this program's models are not tested"))
			}
			return a.modelInfo(c, given[0], engine, options, test)
		},
	}
	info.Flags().StringVar(&engine, "engine", "",
		"torch or torch=ADDRESS where a worker computes the model; default this program")
	info.Flags().BoolVar(&test, "test", false,
		"with --engine torch: read the weights and test the pipeline, as before it is served")
	fields.Bind("", &options).Register(info.Flags(), "generic", "trust_class", "family", "network")
	c.AddCommand(info, fetchCommand(a))
	return c
}

// modelInfo prints the description of a model by folder or name, as this program or a worker sees it. An unknown
// model is a usage error; one that cannot be run gives exit status 1.
func (a *app) modelInfo(c *cobra.Command, name, engine string, options models.TorchOptions, test bool) error {
	dir, info, err := "", (*model.Info)(nil), error(nil)
	if engine != "" {
		dir, info, err = inspectByEngine(c.Context(), name, engine, options, test, c.ErrOrStderr())
	} else {
		var family model.Family
		dir, family, err = families.All().Find(name)
		if errors.Is(err, model.ErrUnknown) {
			dir, family, found := languages.All().Find(name)
			if found == nil {
				return languageInfo(c, dir, family, a.json)
			}
			err = models.Unknown(err, found)
		}
		if err == nil {
			info, err = family.Inspect(dir)
		}
	}
	if err != nil {
		return usage(err)
	}
	if info.SchedulerConfig != nil {
		if err := imageengine.CheckSchedule(info.Card); err != nil {
			info.Problems = append(info.Problems, strings.Split(err.Error(), "\n")...)
		}
	}
	return showInfo(c, a.json, info.Problems, infoJSON(info), func() { printInfo(c.OutOrStdout(), dir, info) })
}

// inspectByEngine asks a worker what it says of a model, and writes what it is waited for to stderr.
func inspectByEngine(ctx context.Context, name, engine string, options models.TorchOptions, test bool,
	stderr io.Writer,
) (string, *model.Info, error) {
	if !models.IsTorch(engine) {
		return "", nil, fmt.Errorf("--engine: %q; must be torch or torch=ADDRESS", engine)
	}
	says := &loading{}
	says.lines.Store(&stderr)
	t := models.TorchAt(engine, engineKey(engine), models.Compute{})
	t.TorchOptions, t.Wait, t.Waiting, t.Tested = options, joinWithin, says.wait, test
	return t.Inspect(ctx, name)
}

// joinWithin is how long a worker that is joined may take to be there.
const joinWithin = 10 * time.Second

// showInfo prints a model's description, with print or as the JSON fields, and its problems. A model with problems
// does not load: exit status 1.
func showInfo(c *cobra.Command, asJSON bool, problems []string, fields any, print func()) error {
	out := c.OutOrStdout()
	if asJSON {
		if err := encode(out, fields); err != nil {
			return err
		}
	} else {
		print()
		if len(problems) == 0 {
			fmt.Fprintln(out, "loads: yes")
		} else {
			fmt.Fprintf(out, "loads: no, %s\n", present.Count(len(problems), "problem"))
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

// printParts prints a table of a model's parts, with their sums.
func printParts(out io.Writer, name, family, dir, source string, parts []model.PartInfo) {
	fmt.Fprintf(out, "%s (%s), %s\n", name, family, dir)
	if source != "" {
		fmt.Fprintf(out, "%s, of the Hugging Face Hub\n", source)
	}
	fmt.Fprintln(out)
	t := present.New("PART", "CLASS", "PARAMETERS", "DTYPES", "FILES", "IN MEMORY")
	parameters, files, memory := 0, 0, 0
	for _, p := range parts {
		t.Row(p.Name, p.Class, present.Thousands(p.Parameters), strings.Join(p.DTypes, " "), present.Size(p.FileBytes),
			present.Size(p.MemoryBytes))
		parameters, files, memory = parameters+p.Parameters, files+p.FileBytes, memory+p.MemoryBytes
	}
	t.Row("all", "", present.Thousands(parameters), "", present.Size(files), present.Size(memory))
	t.Print(out)
}

// printInfo prints the description of an image model.
func printInfo(out io.Writer, dir string, info *model.Info) {
	printParts(out, info.Name, info.Family, dir, info.Source, info.Parts)
	printGPUMemory(out, info)
	when := func(there bool, format string, args ...any) {
		if there {
			present.Linef(out, format, args...)
		}
	}
	fmt.Fprintln(out)
	when(true, "%s%d latent channels per token of %dx%d pixels, at most %s pixels and %s tokens of text",
		present.When(info.Vocabulary > 0, "vocabulary %d, ", info.Vocabulary), info.LatentChannels, info.PixelsPerToken,
		info.PixelsPerToken, present.Thousands(info.MaxPixels), present.Thousands(info.MaxPromptTokens))
	when(true, "defaults %dx%d pixels, %d steps, true_cfg_scale %g, negative prompt %q", info.Width, info.Height,
		info.NumInferenceSteps, info.TrueCFGScale, info.NegativePrompt)
	when(true, "guidance %s, conditioning %s of at most %s a prompt, %s a token", info.CFGRule,
		strings.Join(conditioningOf(info.Card), ", "), present.Size(int(info.ConditioningBytes)),
		present.Size(int(info.ConditioningTokenBytes)))
	when(info.Prompts > 1, "up to %d texts a prompt", info.Prompts)
	when(info.BoundaryRatio > 0, "a second network below sigma %g", info.BoundaryRatio)
	when(info.LatentsDType != "", "states of prompts are stored in %s by default", info.LatentsDType)
	when(info.Guidance > 0, "guidance input %g by default", info.Guidance)
	when(info.Grid != "" || info.Mu != "", "schedule %s, mu %s%s", cmp.Or(info.Grid, model.GridLinspace),
		cmp.Or(info.Mu, model.MuLinear), present.When(info.Mu == model.MuConstant, " %g", info.ConstantMu))
	differs := imageengine.ScheduleDiffers(info.Card)
	when(differs != "", "schedule differs: %s", differs)
	when(differs == "" && len(info.Told) > 0, "the schedule has the bits of the worker's diffusers")
	when(info.Prediction != "", "predicts %s", info.Prediction)
	rows := "together: the bits of one depend on those beside it"
	if info.IndependentRows {
		rows = "each by itself"
	}
	again := "has the same bits"
	if info.Tolerance > 0 {
		again = fmt.Sprintf("may differ by %g", info.Tolerance)
	}
	when(true, "computed by %s, samples %s; one that is computed again %s", cmp.Or(info.Backend, "this program"), rows,
		again)
	when(info.MaxFrames > 1, "videos of %d frames by default, at most %d, 1 more than a multiple of %d; %g a second",
		info.Frames, info.MaxFrames, max(info.FramesPerToken, 1), info.FPS)
	if p := info.Pipeline; p != nil {
		when(true, "pipeline %s, steps in order %s; conditions %s; arguments %s", p.Class,
			cmp.Or(p.RandomAccess, "that --test finds"), inputs(p.Conditions), inputs(p.Arguments))
		when(p.RandomAccess != "", "tested at %dx%d, %d frames", p.Admitted.Width, p.Admitted.Height,
			p.Admitted.Frames)
		for _, note := range p.Notes {
			when(true, "note: %s", note)
		}
	}
	printReward(out, info.Reward)
}

// inputs lists the inputs of a pipeline: those that must be given have an asterisk.
func inputs(of []model.Input) string {
	var list []string
	for _, in := range of {
		list = append(list, in.Name+" "+in.Type+present.When(in.Required, " *")+
			present.When(in.Default != nil, " = %v", in.Default))
	}
	return cmp.Or(strings.Join(list, ", "), "none")
}

// conditioningOf returns the names of a conditioning's tensors, each with that of its mask if the card names one.
func conditioningOf(card model.Card) (names []string) {
	for _, name := range card.Conditioning {
		names = append(names, name+present.When(card.Masks[name] != "", " (mask %s)", card.Masks[name]))
	}
	return names
}

func printReward(out io.Writer, names []string) {
	if len(names) > 0 {
		fmt.Fprintf(out, "reward %s\n", strings.Join(names, ", "))
	}
}

// printGPUMemory says how much memory a GPU must have for a model: weights as bf16 or float32, and the most that a pass
// with guidance adds, for images of some sizes.
func printGPUMemory(out io.Writer, info *model.Info) {
	if info.Pass == nil {
		return
	}
	t := present.New("ON A GPU", "BF16", "FLOAT32")
	var weights, text [2]int
	for _, p := range info.Parts {
		weights[0], weights[1] = weights[0]+p.FactorBytes, weights[1]+p.MemoryBytes
		if p.Name == info.Parts[0].Name {
			text = weights
		}
	}
	t.Row("weights", present.Size(weights[0]), present.Size(weights[1]))
	t.Row(fmt.Sprintf("without %s, which can go to the processor", info.Parts[0].Name),
		present.Size(weights[0]-text[0]), present.Size(weights[1]-text[1]))
	const rank = 64
	t.Row(fmt.Sprintf("and two versions of a LoRA of rank %d on all projections", rank),
		present.Size(2*info.LoRA(rank, 2)), present.Size(2*info.LoRA(rank, 4)))
	sizes := [][2]int{{512, 512}, {1024, 1024}, {1328, 1328}}
	if !slices.Contains(sizes, [2]int{info.Height, info.Width}) {
		sizes = append([][2]int{{info.Height, info.Width}}, sizes...)
	}
	for _, s := range sizes {
		if _, err := info.Tokens(media.ImageSize(s[0], s[1])); err != nil {
			continue
		}
		for _, images := range []int{1, 4, 8} {
			t.Row(fmt.Sprintf("and a pass of %d at %dx%d, guided", images, s[1], s[0]),
				present.Size(info.Pass(media.ImageSize(s[0], s[1]), 2*images, 2)),
				present.Size(info.Pass(media.ImageSize(s[0], s[1]), 2*images, 4)))
		}
	}
	fmt.Fprintln(out)
	t.Print(out)
	one := weights[0] + info.Pass(info.Size, 2, 2)
	present.Linef(out, "in bf16, %s for one image of %dx%d: %s", present.Size(one), info.Width, info.Height,
		leastGPU(one))
}

// leastGPU names the smallest usual GPU with that many bytes free; the driver and the kernels use a twentieth of it.
func leastGPU(bytes int) string {
	for _, gib := range []int{8, 16, 24, 40, 48, 80, 141, 180} {
		if bytes <= gib<<30/20*19 {
			return fmt.Sprintf("fits one GPU of %d GB", gib)
		}
	}
	return "no usual GPU has as much"
}

// infoJSON returns the description of an image model for --json: with the values that empty fields stand for.
func infoJSON(of *model.Info) any {
	info := *of
	if _, err := json.Marshal(info.Card); err != nil { // a number that JSON does not have, or a scheduler that is none
		info.Card = model.Card{Name: info.Name, Family: info.Family}
		info.Problems = append(list(info.Problems), "card: "+err.Error())
	}
	info.Grid, info.Mu = cmp.Or(info.Grid, model.GridLinspace), cmp.Or(info.Mu, model.MuLinear)
	info.Prompts, info.MaxFrames = max(info.Prompts, 1), max(info.MaxFrames, 1)
	info.FramesPerToken = max(info.FramesPerToken, 1)
	info.Parts, info.Problems = list(info.Parts), list(info.Problems)
	return struct {
		model.Info
		Loads bool `json:"loads"`
		// ScheduleDiffers says how diffusers' schedule differs from meander's.
		ScheduleDiffers string `json:"schedule_differs,omitempty"`
	}{info, len(of.Problems) == 0, imageengine.ScheduleDiffers(of.Card)}
}

// list returns a list that JSON has as one, also an empty one.
func list[E any](of []E) []E { return append([]E{}, of...) }

// languageInfo prints the description of a language model.
func languageInfo(c *cobra.Command, dir string, family lm.Family, asJSON bool) error {
	info, err := family.Inspect(dir)
	if err != nil {
		return usage(err)
	}
	info.Parts, info.EOS, info.Problems = list(info.Parts), list(info.EOS), list(info.Problems)
	info.Reward, info.Notes = list(info.Reward), list(info.Notes)
	fields := struct {
		*lm.Info
		Loads bool `json:"loads"`
	}{info, len(info.Problems) == 0}
	return showInfo(c, asJSON, info.Problems, fields, func() { printLanguage(c.OutOrStdout(), dir, info) })
}

// printLanguage prints the description of a language model.
func printLanguage(out io.Writer, dir string, info *lm.Info) {
	printParts(out, info.Name, info.Family, dir, info.Source, info.Parts)
	if info.Vocabulary == 0 {
		return // the problems say why
	}
	line := func(format string, args ...any) { present.Linef(out, format, args...) }
	for _, part := range info.Parts {
		line("in memory as float32; %s where files have bf16, on x86-64 processors and GPUs that compute in it",
			present.Size(part.FactorBytes))
	}
	p := textengine.PolicyOf(info.Card).Text
	fmt.Fprintln(out)
	line("vocabulary %s, of which the tokenizer knows %s; context %s tokens", present.Thousands(info.Vocabulary),
		present.Thousands(info.Tokens), present.Thousands(info.MaxPositions))
	if info.Template != "" {
		line("template %s", info.Template)
	}
	line("defaults max_new_tokens %d, temperature %g, top_k %d, top_p %g, min_p %g; an answer ends with one of the "+
		"tokens %v", p.MaxNewTokens, p.Temperature, p.TopK, p.TopP, p.MinP, info.EOS)
	line("cache %s a token; %s, the default, holds %s tokens of all samples that are under way",
		present.Size(info.CacheTokenBytes), present.Size(info.CacheBytes), present.Thousands(info.CacheTokens))
	perToken := func(bytes int) string { return present.Size(bytes * info.Vocabulary) }
	line("logits of a token, --logits full: %s in F32, %s in F16 or BF16", perToken(4), perToken(2))
	printReward(out, info.Reward)
	for _, note := range info.Notes {
		line("note: %s", note)
	}
}
