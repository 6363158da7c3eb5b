package scorer

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Kinds of reward functions that run outside this process, or wait for a verdict (a reward from outside).
// Their names are KIND:INSTANCE; External may have no instance.
const (
	HTTP     = "http"     // a server that scores images
	NATS     = "nats"     // workers on a queue group
	External = "external" // a person or a batch job
)

// kind is a kind of reward function, and what a prompt may set for it.
type kind struct {
	name     string
	builtin  bool     // this package runs it by itself
	instance string   // the placeholder for its instance in messages; empty: it has none
	alone    bool     // its instance is optional
	compares bool     // it needs a target text
	params   []string // nil: it has none
	free     bool     // any params: they are passed on unchecked
	text     bool     // it rates texts
	any      bool     // it rates images and texts
	video    bool     // it rates videos alone
	sound    bool     // it rates sounds alone
	sees     []string // conditions that it needs
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
	{name: Loudness, builtin: true, sound: true},
	{name: MaxProbMean, builtin: true, text: true},
	{name: Motion, builtin: true, video: true},
	{name: NATS, instance: "NAME", free: true, any: true},
	{name: NumericMatch, builtin: true, text: true, params: numericParams},
	{name: OCR, builtin: true, compares: true, params: ocrParams},
	{name: Silence, builtin: true, sound: true, params: silenceParams},
	{name: Synthetic, builtin: true},
	{name: TopKMass, builtin: true, text: true, params: topKParams},
	{name: Turns, builtin: true, text: true, params: turnsParams},
	{name: Unchanged, builtin: true, sees: []string{conditionImage, conditionMask}},
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

// Everywhere reports whether every program with this package can run the function, without an installed program or
// a configuration.
func Everywhere(name string) bool { return kindOf(name).builtin && name != OCR }

// Kinds lists all names that a prompt may use, sorted, for messages: http:NAME stands for every instance.
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

// Reads reports whether a function reads text in an image. The detail of its score is then that text.
func Reads(name string) bool { return kindOf(name).compares }

// OfText reports whether a function rates only texts.
func OfText(name string) bool { return kindOf(name).text }

// OfTexts lists the functions that can rate texts, for messages.
func OfTexts() []string { return rating(func(k kind) bool { return k.text }) }

// rating lists the functions that can rate a medium: those of it, and those that rate any.
func rating(medium func(kind) bool) []string {
	return slices.DeleteFunc(Kinds(), func(name string) bool { k := kindOf(name); return !medium(k) && !k.any })
}

// Medium is what a sample is, for CheckMedium.
type Medium string

// Media of samples.
const (
	MediumImage Medium = "images"
	MediumVideo Medium = "videos"
	MediumText  Medium = "texts"
	MediumSound Medium = "sounds"
)

// Hears reports whether a function rates only sounds.
func Hears(name string) bool { return kindOf(name).sound }

// CheckMedium refuses a function that can rate none of the media that samples have. Functions of images rate videos,
// too: by the frame in the middle, unless they are told to see more.
func CheckMedium(name string, media ...Medium) error {
	k, _, err := findKind(name)
	has := func(m Medium) bool { return slices.Contains(media, m) }
	made := fmt.Sprint(media[0])
	if len(media) > 1 {
		made += fmt.Sprintf(" with %s", media[1])
	}
	switch {
	case err != nil || k.any:
		return nil // Check reports an unknown name
	case has(MediumText) && !k.text:
		return fmt.Errorf("name: %q; rates images: must be one of %s", name, strings.Join(OfTexts(), ", "))
	case k.text && !has(MediumText):
		return fmt.Errorf("name: %q; rates texts, and the model makes %s", name, made)
	case k.sound && !has(MediumSound):
		return fmt.Errorf("name: %q; rates sounds, and it would judge %s", name, made)
	case media[0] == MediumSound && !k.sound:
		return fmt.Errorf("name: %q; rates images, and it would judge sounds: must be one of %s", name,
			strings.Join(rating(func(k kind) bool { return k.sound }), ", "))
	case k.video && !has(MediumVideo):
		return fmt.Errorf("name: %q; rates videos, and the samples are images (frames is 1)", name)
	}
	return nil
}

// CheckConditions refuses a function that sees conditions of types that a prompt has not.
func CheckConditions(name string, types []string) error {
	k := kindOf(name)
	for _, kind := range k.sees {
		if !slices.Contains(types, kind) {
			return fmt.Errorf("name: %q; sees the conditions %s: the prompt must have a condition of type %s", name,
				strings.Join(k.sees, " and "), kind)
		}
	}
	return nil
}

// Known reports whether there is a kind of functions of that name.
func Known(name string) bool {
	return slices.ContainsFunc(kinds, func(k kind) bool { return k.name == name })
}

// SplitName splits KIND:INSTANCE. An unknown kind, a missing instance, and an instance that the kind does not have
// are errors; the first lists Kinds.
func SplitName(name string) (kind, instance string, err error) {
	k, instance, err := findKind(name)
	return k.name, instance, err
}

// VerdictName returns the name under which verdicts for a function arrive; "" if it is not External.
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

// readyWorkers are the functions of meander-scorer, by what they are also called.
var readyWorkers = map[string]string{
	"pickscore": "pickscore", "pick": "pickscore", "hpsv2": "hpsv2", "hps": "hpsv2", "hpsv21": "hpsv2",
	"hpsv3": "hpsv3", "imagereward": "imagereward", "aesthetic": "aesthetic", "aestheticscore": "aesthetic",
	"clipscore": "clipscore", "clip": "clipscore", "geneval": "geneval", "judge": "judge",
	"editjudge": "edit-judge", "clipdirection": "clip-direction", "editl2": "edit-l2", "vlm": "judge", "vqa": "judge",
}

// Hint says what may be meant by an unknown kind, before what it must be: a function that a worker computes, or those
// that contain it; empty: nothing.
func Hint(name string) string {
	plain := strings.NewReplacer("_", "", "-", "", ".", "", " ", "").Replace(strings.ToLower(name))
	if worker := readyWorkers[plain]; worker != "" {
		return fmt.Sprintf("a worker computes it: start 'meander-scorer %s', and write nats:%[1]s; else it ", worker)
	}
	var near []string
	for _, kind := range Kinds() {
		if len(plain) > 2 && strings.Contains(strings.ReplaceAll(kind, "_", ""), plain) {
			near = append(near, kind)
		}
	}
	if len(near) == 0 {
		return ""
	}
	return "did you mean " + strings.Join(near, " or ") + "? "
}

// kindOf returns the kind of a function; one without any property where the name asks for none.
func kindOf(name string) kind {
	k, _, _ := findKind(name)
	return k
}

// findKind returns the kind and the instance that a name asks for. Errors are those of SplitName.
func findKind(name string) (kind, string, error) {
	base, instance, split := strings.Cut(name, ":")
	i := slices.IndexFunc(kinds, func(k kind) bool { return k.name == base })
	switch {
	case i < 0:
		return kind{}, "", fmt.Errorf("name: %q; %smust be one of %s", name, Hint(base), strings.Join(Kinds(), ", "))
	case kinds[i].instance == "" && split:
		return kind{}, "", fmt.Errorf("name %q: %s has no instances, leave out %q", name, base, ":"+instance)
	case kinds[i].instance != "" && instance == "" && (split || !kinds[i].alone):
		return kind{}, "", fmt.Errorf("name: %q; must be %s:NAME, the name of a configured instance", name, base)
	}
	return kinds[i], instance, nil
}

// Check refuses what is wrong before an image is made: an unknown name, params that the function does not have, and
// a missing target for a function that compares. truth is a value of JSON; of those functions only a text or a number
// is one.
func Check(name, prompt string, truth any, params map[string]string) error {
	k, _, err := findKind(name)
	if err != nil {
		return err
	}
	var errs []error
	groundTruth := ""
	switch truth.(type) {
	case nil:
	case []any, map[string]any, bool:
		if k.compares || k.name == ExactMatch || k.name == NumericMatch {
			return fmt.Errorf("ground_truth: %.60s; must be a text or a number for %s", fmt.Sprint(truth), name)
		}
	default:
		groundTruth = fmt.Sprint(truth)
	}
	if !k.free {
		for _, p := range slices.Sorted(maps.Keys(params)) {
			switch {
			case len(k.params) == 0:
				errs = append(errs, fmt.Errorf("params: %q is unknown; %s has none", p, name))
			case !slices.Contains(k.params, p):
				errs = append(errs, fmt.Errorf("params: %q is unknown; %s has %s", p, name,
					strings.Join(k.params, ", ")))
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
		_, err = parseOCROptions(params)
	case JPEGCompressibility, JPEGIncompressibility:
		_, err = jpegDivisor(params)
	case Silence:
		_, err = silenceBound(params)
	case ExactMatch, NumericMatch, TopKMass, Turns:
		_, err = parseTextOptions(params)
	}
	return err
}

// WantsTruth reports whether a reward function may use a ground truth: all but the built-in ones that do not need it.
func WantsTruth(name string) bool {
	return !slices.Contains(Names(), name) || Check(name, "", "", nil) != nil
}
