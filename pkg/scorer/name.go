package scorer

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Kinds of reward functions that run elsewhere, or wait for somebody. Their names have
// an instance, kind:instance; External may do without.
const (
	HTTP     = "http"     // a server that scores images
	NATS     = "nats"     // workers on a queue group
	ONNX     = "onnx"     // a network in a file
	External = "external" // a person or a batch job, whenever it is ready
)

// kind is what a name may ask for.
type kind struct {
	name     string
	builtin  bool     // this package runs it by itself
	instance string   // how messages list it; empty: it has none
	alone    bool     // it may do without its instance
	compares bool     // it needs a target text
	params   []string // nil: it has none
	free     bool     // params are handed on unread
	text     bool     // it rates texts
	any      bool     // it rates images and texts
}

var kinds = []kind{
	{name: Confidence, builtin: true, text: true},
	{name: Diversity, builtin: true},
	{name: EntropyMean, builtin: true, text: true},
	{name: ExactMatch, builtin: true, text: true, params: matchParams},
	{name: External, instance: "NAME", alone: true, any: true},
	{name: Glyph, builtin: true, compares: true},
	{name: HTTP, instance: "NAME", free: true, any: true},
	{name: JPEGCompressibility, builtin: true, params: jpegParams},
	{name: JPEGIncompressibility, builtin: true, params: jpegParams},
	{name: MaxProbMean, builtin: true, text: true},
	{name: NATS, instance: "NAME", free: true, any: true},
	{name: NumericMatch, builtin: true, text: true, params: numericParams},
	{name: OCR, builtin: true, compares: true, params: ocrParams},
	{name: ONNX, instance: "NAME"},
	{name: Synthetic, builtin: true},
	{name: TopKMass, builtin: true, text: true, params: topKParams},
	{name: Turns, builtin: true, text: true, params: turnsParams},
}

// Names lists the reward functions that this package runs by itself, sorted.
func Names() []string {
	var names []string
	for _, k := range kinds {
		if k.builtin {
			names = append(names, k.name)
		}
	}
	return names
}

// Everywhere says whether each program with this package runs the function, whatever is
// installed or configured.
func Everywhere(name string) bool {
	k, _, err := find(name)
	return err == nil && k.builtin && name != OCR
}

// Kinds lists everything a prompt may name, sorted, as messages do: http:NAME stands for
// every instance.
func Kinds() []string {
	var names []string
	for _, k := range kinds {
		if k.instance == "" || k.alone {
			names = append(names, k.name)
		}
		if k.instance != "" {
			names = append(names, k.name+":"+k.instance)
		}
	}
	return names
}

// Reads says whether a function reads an image: the detail of its score is the text that it read.
func Reads(name string) bool {
	k, _, err := find(name)
	return err == nil && k.compares
}

// OfText says whether a function rates texts.
func OfText(name string) bool {
	k, _, err := find(name)
	return err == nil && k.text
}

// OfTexts lists the functions that rate texts, as messages do.
func OfTexts() []string {
	var names []string
	for _, name := range Kinds() {
		if k, _, err := find(name); err == nil && (k.text || k.any) {
			names = append(names, name)
		}
	}
	return names
}

// CheckMedium refuses a function that does not rate what a model makes, texts or images.
func CheckMedium(name string, text bool) error {
	k, _, err := find(name)
	switch {
	case err != nil || k.any || k.text == text:
		return nil // Check has its own word on names
	case text:
		return fmt.Errorf("name: %q; rates images: must be one of %s", name, strings.Join(OfTexts(), ", "))
	}
	return fmt.Errorf("name: %q; rates texts, and the model makes images", name)
}

// SplitName splits KIND:INSTANCE. An unknown kind, a missing instance or one too many is
// an error that lists Kinds.
func SplitName(name string) (kind, instance string, err error) {
	k, instance, err := find(name)
	return k.name, instance, err
}

// VerdictName is the name that verdicts for a function have; empty: it takes none.
func VerdictName(name string) string {
	kind, instance, err := SplitName(name)
	switch {
	case err != nil || kind != External:
		return ""
	case instance == "":
		return External
	}
	return instance
}

func find(name string) (kind, string, error) {
	base, instance, split := strings.Cut(name, ":")
	i := slices.IndexFunc(kinds, func(k kind) bool { return k.name == base })
	switch {
	case i < 0:
		return kind{}, "", fmt.Errorf("name: %q; must be one of %s", name, strings.Join(Kinds(), ", "))
	case kinds[i].instance == "" && split:
		return kind{}, "", fmt.Errorf("name %q: %s has no instances, leave out %q", name, base, ":"+instance)
	case kinds[i].instance != "" && instance == "" && (split || !kinds[i].alone):
		return kind{}, "", fmt.Errorf("name: %q; must be %s:NAME, the name of a configured instance", name, base)
	}
	return kinds[i], instance, nil
}

// Check refuses what can be seen before an image is made: an unknown name, params that
// the function does not have, a function that compares without a target.
func Check(name, prompt, groundTruth string, params map[string]string) error {
	k, _, err := find(name)
	if err != nil {
		return err
	}
	var errs []error
	if !k.free {
		for _, p := range slices.Sorted(maps.Keys(params)) {
			switch {
			case len(k.params) == 0:
				errs = append(errs, fmt.Errorf("params: %q is unknown; %s has none", p, name))
			case !slices.Contains(k.params, p):
				errs = append(errs, fmt.Errorf("params: %q is unknown; %s has %s", p, name, strings.Join(k.params, ", ")))
			}
		}
	}
	if len(errs) == 0 {
		errs = append(errs, k.checkParams(params))
	}
	if k.name == ExactMatch && groundTruth == "" {
		errs = append(errs, fmt.Errorf("ground_truth: empty; %s needs one", name))
	}
	if k.name == NumericMatch {
		if _, err := NumericTarget(prompt, groundTruth); err != nil {
			errs = append(errs, fmt.Errorf("%w; %s needs one", err, name))
		}
	}
	if k.compares {
		if _, err := Target(prompt, groundTruth); err != nil {
			errs = append(errs, fmt.Errorf("%w; %s needs one", err, name))
		}
	}
	return errors.Join(errs...)
}

// checkParams checks the values of params that the function has.
func (k kind) checkParams(params map[string]string) error {
	var err error
	switch k.name {
	case OCR:
		_, err = ocrOptions(params)
	case JPEGCompressibility, JPEGIncompressibility:
		_, err = jpegDivisor(params)
	case ExactMatch, NumericMatch, TopKMass, Turns:
		_, err = readOptions(params)
	}
	return err
}
