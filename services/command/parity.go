package command

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/services/internal/present"
	imageengine "github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/models"
)

// Bounds of a verdict: the largest relative distance of the last latents, and the mean distance of pixels in steps of
// 1/255, by the element type of the network.
var parityBounds = map[string][2]float64{"f32": {1e-4, 0.5}, "bf16": {0.1, 6}, "f16": {0.1, 6}}

// comparer is one 'meander parity'.
type comparer struct {
	*app
	model          string
	own            bool
	device, dtype  string
	torch          models.TorchOptions
	given          conditionFlags
	dir            string
	stdout, stderr io.Writer
}

// shared are the flags of a prompt that the pipeline of diffusers gets as meander does, by the names of both.
var shared = map[string]string{
	"negative-prompt": "negative-prompt", "steps": "steps", "height": "height", "width": "width", "frames": "frames",
	"true-cfg-scale": "guidance", "seed": "seed",
}

// parityCommand makes the command 'meander parity'.
func parityCommand(a *app) *cobra.Command {
	p := &comparer{app: a}
	prompt := "a red sign that says OPEN"
	c := &cobra.Command{
		Use:   "parity [PROMPT]",
		Short: "compare a model folder in diffusers' own pipeline with the same in meander",
		Long: `parity makes one sample of a folder twice: by the pipeline of diffusers, with its own loop and
scheduler, and by meander with ode steps, from the same first state. It prints sigmas, timesteps, the
distance of the states before each step, and that of the pixels. It needs the Python of the torch engine.
A pipeline that is computed as a whole is called with the arguments that the worker gives it.

Both compute on this machine, one after the other, so memory is needed for one model.

Exit status: 0 they agree, 1 they do not.`,
		Example: `  meander parity --model DIR
  meander parity --model DIR --steps 8 --height 512 --width 512 'a red fox'
  meander parity --model EDIT --condition image=in.png 'make it blue'    # a pipeline that edits images
  meander parity --model EDIT --set max_sequence_length=256 'make it blue'    # an argument of the pipeline
  meander parity --model deploy/models/signs --own     # this program computes the network`,
		RunE: func(c *cobra.Command, given []string) error {
			p.stdout, p.stderr = c.OutOrStdout(), c.ErrOrStderr()
			if len(given) > 0 {
				prompt = given[0]
			}
			if p.model == "" {
				return usage(errors.New("--model: not given; must be the folder of a model"))
			}
			return p.compare(c.Context(), c.Flags(), prompt)
		},
	}
	f := c.Flags()
	f.StringVar(&p.model, "model", "", "folder of a pipeline of diffusers")
	f.BoolVar(&p.own, "own", false, "this program computes the network, instead of the torch engine")
	f.StringVar(&p.device, "device", "auto", "what PyTorch computes on: auto, cpu, cuda:0")
	f.StringVar(&p.dtype, "dtype", "auto", "what PyTorch computes in: auto, f32, bf16")
	p.given.addFlags(f)
	f.String("negative-prompt", "", "what guidance leads away from; default the model's")
	for _, name := range []string{"steps", "height", "width", "frames", "seed"} {
		f.Int(name, 0, name+" of the sample; default the model's")
	}
	f.Lookup("seed").Usage = "seed of the first state"
	f.Float64("true-cfg-scale", 0, "scale of guidance; default the model's")
	fields.Bind("", &p.torch).Register(f, "generic", "trust_class", "family")
	return c
}

// referenceSays is what the reference prints.
type referenceSays struct {
	Class     string `json:"class"`
	Scheduler string `json:"scheduler"`
	Note      string `json:"note"`
	Solver    string `json:"solver"`
	// Whole says that a flow has timesteps that are rounded to whole numbers.
	Whole    bool              `json:"whole_timesteps"`
	DType    string            `json:"dtype"`
	Device   string            `json:"device"`
	Versions map[string]string `json:"versions"`
	Steps    int               `json:"steps"`
	Frames   int               `json:"frames"`
	Height   int               `json:"height"`
	Width    int               `json:"width"`
	Guidance float64           `json:"guidance"`
}

// parityStep compares a state: that before step Step, or the last.
type parityStep struct {
	Step     int     `json:"step"`
	Sigma    float64 `json:"sigma_diffusers"`
	Ours     float64 `json:"sigma_meander"`
	Timestep float64 `json:"timestep_diffusers"`
	// Max is the largest distance of an element, Mean the mean of all, Relative that of the whole (L2).
	Max      float64 `json:"latents_max"`
	Mean     float64 `json:"latents_mean"`
	Relative float64 `json:"latents_relative"`
}

// parityReport is the whole comparison.
type parityReport struct {
	Reference referenceSays `json:"reference"`
	Steps     []parityStep  `json:"steps"`
	PixelsMax int           `json:"pixels_max"`
	PixelMean float64       `json:"pixels_mean"`
	Faults    []string      `json:"faults"`
	Agree     bool          `json:"agree"`
}

// compare makes both samples and prints how they differ.
func (p *comparer) compare(ctx context.Context, f *pflag.FlagSet, prompt string) (err error) {
	if p.dir, err = os.MkdirTemp("", "meander-parity-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.dir)) }()
	file := filepath.Join(p.dir, "reference.safetensors")
	args := []string{"--prompt", prompt, "--device", p.device, "--dtype", p.dtype}
	var both []string
	f.Visit(func(flag *pflag.Flag) {
		if to := shared[flag.Name]; to != "" {
			args = append(args, "--"+to+"="+flag.Value.String())
			both = append(both, "--"+flag.Name+"="+flag.Value.String())
		}
	})
	for flag, list := range map[string][]string{"--condition": p.given.files, "--set": p.given.values} {
		for _, c := range list {
			args, both = append(args, flag, c), append(both, flag, c)
		}
	}
	for _, name := range []string{"generic", "trust-class", "family"} {
		if flag := f.Lookup(name); flag.Changed {
			args = append(args, strings.TrimSuffix("--"+name+"="+flag.Value.String(), "=true"))
			both = append(both, "--"+name+"="+flag.Value.String())
		}
	}
	fmt.Fprintln(p.stderr, "the pipeline of diffusers makes its sample")
	said, err := models.Reference(ctx, p.model, file, args...)
	if err != nil {
		return usage(err)
	}
	r := &parityReport{Faults: []string{}}
	if err := json.Unmarshal(said, &r.Reference); err != nil {
		return fmt.Errorf("read what the pipeline says: %w", err)
	}
	fmt.Fprintln(p.stderr, "meander makes its own")
	if err := p.roll(ctx, r, file, both, prompt); err != nil {
		return err
	}
	if err := p.read(r, file); err != nil {
		return err
	}
	return p.print(r)
}

// roll makes the sample of meander, in a store of its own, from the first state of the reference.
func (p *comparer) roll(ctx context.Context, r *parityReport, file string, both []string, prompt string) error {
	keep := make([]string, r.Reference.Steps+1)
	for i := range keep {
		keep[i] = strconv.Itoa(i)
	}
	args := []string{
		"run", "--nats=", "--context=", "--store", filepath.Join(p.dir, "store"), "--out", filepath.Join(p.dir, "out"),
		"--model", p.model, "--run", "parity", "--group-size", "1", "--sde-type", "ode", "--solver", r.Reference.Solver,
		"--start-latents", file, "--start-step", "0", "--return-steps", strings.Join(keep, ","), "--latents-dtype",
		"F32", "--save-latents", filepath.Join(p.dir, "ours.safetensors"), "--reward", "jpeg_compressibility",
		"--steps", strconv.Itoa(r.Reference.Steps), "--height", strconv.Itoa(r.Reference.Height),
		"--width", strconv.Itoa(r.Reference.Width), "--log-level", p.logLevel,
	}
	if r.Reference.Frames > 1 {
		args = append(args, "--frames", strconv.Itoa(r.Reference.Frames))
	}
	if !p.own {
		args = append(args, "--engine", "torch", "--device", p.device, "--dtype", r.Reference.DType)
	}
	said := &strings.Builder{}
	if status := Execute(ctx, append(append(args, both...), prompt), strings.NewReader(""), said, said); status != 0 {
		return fmt.Errorf("meander's sample: %s", strings.TrimSpace(said.String()))
	}
	return ctx.Err()
}

// read compares what both made.
func (p *comparer) read(r *parityReport, file string) (err error) {
	theirs, err := safetensors.Open(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, theirs.Close()) }()
	ours, err := safetensors.Open(filepath.Join(p.dir, "ours.safetensors"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.Close()) }()
	sample, err := p.sample()
	if err != nil {
		return err
	}
	sigmas, sigmaErr := theirs.Floats("sigmas")
	timesteps, err := theirs.Floats("timesteps")
	if err = errors.Join(sigmaErr, err); err != nil {
		return err
	}
	for i := range sigmas {
		name := fmt.Sprintf("latents.%d", i)
		a, theirErr := theirs.Floats(name)
		b, err := ours.Floats(sample.name + "." + name)
		if err = errors.Join(theirErr, err); err != nil {
			return err
		}
		s := parityStep{Step: i, Sigma: float64(sigmas[i])}
		if i < len(timesteps) {
			s.Timestep = float64(timesteps[i])
		}
		if i < len(sample.sigmas) {
			s.Ours = sample.sigmas[i]
		}
		s.Max, s.Mean, s.Relative = apart(a, b)
		r.Steps = append(r.Steps, s)
	}
	pixels, err := theirs.Bytes("media")
	if err != nil {
		return fmt.Errorf("the pipeline makes no images: %w", err)
	}
	got := sample.media.RGB()
	if len(got) != len(pixels) {
		return fmt.Errorf("%d bytes of pixels; the pipeline makes %d", len(got), len(pixels))
	}
	for i, x := range pixels {
		d := max(int(x), int(got[i])) - min(int(x), int(got[i]))
		r.PixelsMax, r.PixelMean = max(r.PixelsMax, d), r.PixelMean+float64(d)/float64(len(pixels))
	}
	r.judge()
	return nil
}

// judge finds where the two do not agree.
func (r *parityReport) judge() {
	for _, s := range r.Steps {
		ours, theirs := float32(s.Ours), float32(s.Sigma)
		if !imageengine.SameSigma(ours, theirs, r.Reference.Whole && s.Step == 0) {
			r.Faults = append(r.Faults, fmt.Sprintf("sigma %d: %v in diffusers, %v in meander", s.Step, theirs, ours))
			break
		}
	}
	last, bound := r.Steps[len(r.Steps)-1], parityBounds[cmp.Or(r.Reference.DType, "f32")]
	if !(last.Relative <= bound[0]) {
		r.Faults = append(r.Faults, fmt.Sprintf("the last latents are %.2g apart; must be within %g", last.Relative,
			bound[0]))
	}
	if !(r.PixelMean <= bound[1]) {
		r.Faults = append(r.Faults, fmt.Sprintf("pixels are %.2f of 255 apart in the mean; must be within %g",
			r.PixelMean, bound[1]))
	}
	r.Agree = len(r.Faults) == 0
}

// notes says what explains a difference: a network of this program gets the timestep of its sigma, not a whole one.
func (r *parityReport) notes(own bool) []string {
	for _, s := range r.Steps[:len(r.Steps)-1] {
		if t := 1000 * s.Sigma; own && r.Reference.Whole && math.Abs(t-s.Timestep) > 0.01 {
			return []string{fmt.Sprintf("%s gives its network whole timesteps, %g for sigma %.7f; meander gives %.4f",
				r.Reference.Scheduler, s.Timestep, s.Sigma, t)}
		}
	}
	return nil
}

// made is the sample that meander made: the name of its group, its sigmas [T+1] and its pixels.
type made struct {
	name   string
	sigmas []float64
	media  media.Media
}

// sample reads the one sample of results.jsonl.
func (p *comparer) sample() (m made, err error) {
	file, err := os.Open(filepath.Join(p.dir, "out", "results.jsonl"))
	if err != nil {
		return m, err
	}
	defer file.Close()
	line, err := bufio.NewReader(file).ReadBytes('\n')
	if err != nil {
		return m, err
	}
	var g struct {
		UID     string `json:"uid"`
		Status  string `json:"status"`
		Members []struct {
			view.Member
			Rollout struct {
				Sigmas []float64 `json:"sigmas"`
			} `json:"rollout"`
		} `json:"members"`
	}
	if err := json.Unmarshal(line, &g); err != nil {
		return m, fmt.Errorf("read %s: %w", file.Name(), err)
	}
	if len(g.Members) != 1 || g.Members[0].Image == "" {
		return m, fmt.Errorf("meander's sample has no image: its group is %s", g.Status)
	}
	one := g.Members[0]
	m.name, m.sigmas = g.UID, append(one.Rollout.Sigmas, 0)
	data, err := os.ReadFile(cmp.Or(one.Video, one.Image))
	if err == nil {
		m.media, err = media.DecodeInput(data)
	}
	return m, err
}

// print prints the comparison; that the two do not agree is exit status 1.
func (p *comparer) print(r *parityReport) error {
	out, ref := p.stdout, r.Reference
	if p.json {
		if err := encode(out, r); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(out, "%s, %s, diffusers %s, torch %s, %s on %s\n", ref.Class, ref.Scheduler,
			ref.Versions["diffusers"], ref.Versions["torch"], ref.DType, ref.Device)
		fmt.Fprintf(out, "%d steps of %dx%d, true_cfg_scale %g, solver %s\n\n", ref.Steps, ref.Width, ref.Height,
			ref.Guidance, ref.Solver)
		t := present.New("STATE", "TIMESTEP", "SIGMA", "MEANDER'S", "LATENTS MAX", "MEAN", "RELATIVE")
		for _, s := range r.Steps {
			timestep := "-"
			if s.Step < ref.Steps {
				timestep = fmt.Sprintf("%.4f", s.Timestep)
			}
			t.Row(s.Step, timestep, fmt.Sprintf("%.7f", s.Sigma), fmt.Sprintf("%.7f", s.Ours),
				fmt.Sprintf("%.2g", s.Max), fmt.Sprintf("%.2g", s.Mean), fmt.Sprintf("%.2g", s.Relative))
		}
		t.Print(out)
		fmt.Fprintf(out, "\npixels: %d of 255 apart at most, %.3f in the mean\n", r.PixelsMax, r.PixelMean)
		for _, note := range append(r.notes(p.own), ref.Note) {
			if note != "" {
				fmt.Fprintln(out, note)
			}
		}
		for _, fault := range r.Faults {
			fmt.Fprintln(out, fault)
		}
		fmt.Fprintln(out, map[bool]string{true: "they agree", false: "they do NOT agree"}[r.Agree])
	}
	if !r.Agree {
		return &exitError{status: exitFailed}
	}
	return nil
}

// apart returns how far two states are apart: by the largest and the mean element, and relative to the first (L2).
func apart(a, b []float32) (most, mean, relative float64) {
	if len(a) != len(b) {
		return math.Inf(1), math.Inf(1), math.Inf(1)
	}
	var off, size float64
	for i := range a {
		d := math.Abs(float64(a[i]) - float64(b[i]))
		most, mean = max(most, d), mean+d/float64(len(a))
		off, size = off+d*d, size+float64(a[i])*float64(a[i])
	}
	return most, mean, math.Sqrt(off / size)
}
