package command

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/schemas"
)

// promptFlags are the fields of a Prompt as flags. They fill in what a prompt of a file does not say.
type promptFlags struct {
	datasetFlags
	rewardFlags
	conditionFlags
	// fields are those of a Prompt and of all structs in it; the others are parts of them.
	fields                                                *fields.Set
	advantage, policy, place, scheduled, ramp, reflexflow *fields.Set
	batch                                                 string
	refillFresh                                           bool

	// messages is the file of a conversation; empty: none. conversation is what it has.
	messages     string
	conversation []any

	// states are those of --start-latents; nil: none.
	states *states
	// images are the images that samples start from; nil: none.
	images *images

	set func(name string) bool
}

// fieldsOfPrompt returns the flags of a Prompt and of all structs in it.
func fieldsOfPrompt() *fields.Set {
	schema, _ := schemas.JSONSchema(schemas.TypePrompt)
	return fields.New(reflect.TypeFor[schemas.Prompt](), schema, map[string]fields.Codec{
		"deadline": {Kind: "duration", Hint: "as a time from now, e.g. 10m", Parse: deadline},
		"rollout.sde_window": {
			Kind: "window", Hint: "SIZE[:LOW-HIGH[:STRATEGY[:SEED]]], HIGH exclusive, STRATEGY " +
				strings.Join(schemas.WindowStrategies, ", ") +
				"; the same for all groups of a batch, SEED default --seed or the run",
			Parse: parseWindow, Text: windowText,
		},
		"start.latents": {
			Kind: "file", Hint: "a safetensors file (--save-latents), or one packed tensor", Parse: verbatim,
		},
		"start.branch": {Kind: "state", Hint: "[RUN/]UID/SAMPLE@STEP; 'meander show' shows them", Parse: parseBranch},
		"start.data.images": {
			Kind: "path",
			Hint: "a PNG for all samples, or a folder: one PNG for each sample of the prompt, or for each of several " +
				"prompts", Parse: verbatim,
		},
		"text.logits": {
			Kind: "logits",
			Hint: "topk[:K], ids:ID,ID... or full, then [:F32|F16|BF16], [:raw|processed] and [:answers=0,2], e.g. " +
				"topk:20:F16", Parse: parseLogits,
		},
		"text.stop_token_ids":         {Kind: "ids", Hint: "e.g. 2,7"},
		"text.interaction.timeout_ms": {Kind: "duration", Hint: "e.g. 30s", Parse: milliseconds},
		"text.interaction.params":     {Kind: "params", Hint: "NAME=VALUE,NAME=VALUE,...", Parse: parseParams},
		"tree.branches": {
			Kind: "branches", Hint: "WIDTH@STEP,..., e.g. 2@2,2@5: two paths from step 2, four from step 5",
			Parse: parseBranches,
		},
		"rules": {
			Kind: "rules", Hint: "NAME=LIMIT, or NAME=tell, pause or off, of " +
				strings.Join(schemas.RuleNames, ", ") + "; e.g. reader=0.1,reader=pause,kl=off", Parse: parseRules,
		},
		"batch.step":          {Hint: "of the first batch; each further batch has one more"},
		"advantage.estimator": {Hint: "one of " + strings.Join(estimator.Names(), ", ")},
		"advantage.mode":      {Hint: estimatorModes()},
	})
}

// addFlags adds all flags of prompts to f, under their headings. Most are made of the fields of the prompt's types.
func (p *promptFlags) addFlags(f *pflag.FlagSet) {
	p.set, p.fields = f.Changed, fieldsOfPrompt()
	p.advantage, p.policy, p.place = p.fields.Part("advantage"), p.fields.Part("group_policy"), p.fields.Part("batch")
	p.scheduled, p.ramp = p.fields.Part("scheduled_sampling"), p.fields.Part("scheduled_sampling.ramp")
	p.reflexflow = p.fields.Part("scheduled_sampling.reflexflow")
	register := func(f *pflag.FlagSet, paths ...string) {
		for _, path := range paths {
			p.fields.Part(path).Register(f)
		}
	}
	addSection(f, promptSection, p.datasetFlags.addFlags)
	var deadline pflag.FlagSet
	p.fields.Part("").Register(&deadline, "deadline", "rules") // listed with the flags of groups
	addSection(f, samplingSection, func(f *pflag.FlagSet) {
		p.fields.Part("").Register(f, "group_size", "seed", "num_inference_steps")
		register(f, "", "rollout", "start", "start.data", "stop", "tree", "prune")
		p.conditionFlags.addFlags(f)
	})
	addSection(f, textSection, func(f *pflag.FlagSet) {
		f.StringVar(&p.messages, "messages", "",
			"JSON file of a conversation to answer, instead of prompts: [{\"role\": \"user\", \"content\": \"...\"}, "+
				"...]")
		register(f, "text", "text.interaction")
	})
	addSection(f, scheduledSection, func(f *pflag.FlagSet) {
		register(f, "scheduled_sampling", "scheduled_sampling.ramp", "scheduled_sampling.reflexflow")
	})
	addSection(f, rewardSection, p.rewardFlags.addFlags)
	addSection(f, rewardSection, p.by.addFlag)
	addSection(f, advantageSection, func(f *pflag.FlagSet) { p.advantage.Register(f) })
	addSection(f, groupSection, func(f *pflag.FlagSet) {
		p.registerGroups(f)
		f.AddFlagSet(&deadline)
	})
}

// registerGroups adds the flags of groups and batches to f.
func (p *promptFlags) registerGroups(f *pflag.FlagSet) {
	f.IntVar(&p.choice.BatchSize, "batch-size", 0,
		"join this many prompts to a batch, in order; the last batch may be smaller")
	f.IntVar(&p.choice.Batches, "batches", 0,
		"make this many batches of --batch-size, in several passes over the prompts if needed; with --shuffle each "+
			"pass has its own order")
	f.StringVar(&p.batch, "batch-id", "",
		"join all prompts to one batch with this name; with --batch-size, the prefix of the names")
	p.place.Register(f)
	p.policy.Register(f)
	f.BoolVar(&p.refillFresh, "refill-fresh", false,
		"refill a group with the next prompts of the data set, not with the same prompt again")
}

func verbatim(s string) (any, error) { return s, nil }

// deadline reads a duration from now, and returns Unix nanoseconds.
func deadline(s string) (any, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		return nil, fmt.Errorf("%q; must be a duration such as 10m", s)
	}
	return time.Now().Add(d).UnixNano(), nil
}

// parseBranch reads the value of --start-branch, [RUN/]UID/SAMPLE@STEP, as the field of a prompt. The error shows the
// form.
func parseBranch(s string) (any, error) {
	path, step, at := strings.Cut(s, "@")
	parts := strings.Split(path, "/")
	n := len(parts)
	index, err1 := strconv.ParseInt(step, 10, 64)
	sample, err2 := strconv.ParseInt(parts[n-1], 10, 64)
	if !at || err1 != nil || err2 != nil || n < 2 || n > 3 {
		return nil, fmt.Errorf("%q; must be [RUN/]UID/SAMPLE@STEP, e.g. demo/p1/0@5: the state before step 5 of "+
			"sample 0 of group p1", s)
	}
	b := map[string]any{"uid": parts[n-2], "sample_index": sample, "step_index": index}
	if n == 3 {
		b["run"] = parts[0]
	}
	return b, nil
}

// parseBranches reads the branch points of a tree, WIDTH@STEP,..., as the field of a prompt. The error shows the
// form.
func parseBranches(s string) (any, error) {
	var list []any
	for part := range strings.SplitSeq(s, ",") {
		width, step, at := strings.Cut(strings.TrimSpace(part), "@")
		n, err1 := strconv.ParseInt(width, 10, 64)
		k, err2 := strconv.ParseInt(step, 10, 64)
		if !at || err1 != nil || err2 != nil {
			return nil, fmt.Errorf("%q; must be WIDTH@STEP for each branch point, e.g. 2@2,2@5", s)
		}
		list = append(list, map[string]any{"width": n, "step_index": k})
	}
	return list, nil
}

// parseRules reads the value of --rule as the field rules of a prompt. The error shows the form.
func parseRules(s string) (any, error) {
	var list []any
	for part := range strings.SplitSeq(s, ",") {
		name, value, given := strings.Cut(strings.TrimSpace(part), "=")
		if !given || name == "" || value == "" {
			return nil, fmt.Errorf("%q; must be NAME=LIMIT or NAME=ACTION, e.g. reader=0.1,kl=off", s)
		}
		i := slices.IndexFunc(list, func(x any) bool { return x.(map[string]any)["name"] == name })
		if i < 0 {
			i, list = len(list), append(list, map[string]any{"name": name})
		}
		spec, key, said := list[i].(map[string]any), "action", any(value)
		if limit, err := strconv.ParseFloat(value, 64); err == nil {
			key, said = "limit", limit
		}
		if spec[key] != nil {
			return nil, fmt.Errorf("%q; must give the %s of %s once", s, key, name)
		}
		spec[key] = said
	}
	return list, nil
}

// fieldsOfFlags returns the fields of a prompt that the flags set, except those of the batch, and opens the files
// that they name. It also sets p.names. An error names the flag.
func (p *promptFlags) fieldsOfFlags() (map[string]any, error) {
	d := p.fields.GivenValues()
	delete(d, "batch") // see joinToBatch
	d["v"] = int64(schemas.Version)
	p.names = fieldFlags{set: p.fields.Flags(false), all: p.fields.Flags(true)}
	if rollout, _ := d["rollout"].(map[string]any); rollout != nil {
		w, drawn := rollout["sde_window"].(map[string]any)
		if seed, given := d["seed"]; drawn && given && w["seed"] == nil {
			w["seed"] = seed // so that equal seeds give equal runs
		}
	}
	var errs []error
	if start, _ := d["start"].(map[string]any); start["latents"] != nil {
		errs = append(errs, p.openStates(start["latents"].(string)))
		start["latents"] = noStates
	}
	if data, _ := startOf(d)["data"].(map[string]any); data != nil {
		errs = append(errs, p.findImages(data["images"].(string)))
	}
	if p.images != nil {
		if d["start"] == nil {
			d["start"] = map[string]any{}
		}
		startOf(d)["data"] = noImages
	}
	errs = append(errs, p.conditionFlags.setFields(d, p.names.set))
	specs, err := p.rewardSpecs()
	errs = append(errs, err)
	if specs != nil {
		d["reward"], p.names.set["reward"] = specs, "reward"
	}
	return d, errors.Join(errs...)
}

// findImages finds the files of --start-image, a PNG or a folder.
func (p *promptFlags) findImages(path string) error {
	if p.images != nil {
		return errors.New("--start-image: given; must be absent where the arguments are images")
	}
	files, err := imageFiles(path)
	if err != nil {
		return fmt.Errorf("--start-image: %w", err)
	}
	p.images = &images{flag: "--start-image", files: files}
	return nil
}

// merged returns body with the fields that it lacks from defaults, also in maps that both have. It changes neither.
func merged(body, defaults map[string]any) map[string]any {
	out := maps.Clone(body)
	for k, v := range defaults {
		have, there := out[k]
		inner, a := have.(map[string]any)
		more, b := v.(map[string]any)
		switch {
		case !there || k == "start" && have == nil:
			out[k] = v
		case a && b:
			out[k] = merged(inner, more)
		}
	}
	return out
}

// parseWindow reads the value of --sde-window, SIZE[:LOW-HIGH[:STRATEGY[:SEED]]]; parts in the middle may be empty.
// The error shows the form.
func parseWindow(s string) (any, error) {
	bad := fmt.Errorf("%q; must be SIZE[:LOW-HIGH[:STRATEGY[:SEED]]], e.g. 2:0-5:random:7", s)
	parts := strings.Split(s, ":")
	size, err := strconv.ParseInt(parts[0], 10, 64)
	if err != nil || len(parts) > 4 {
		return nil, bad
	}
	w := map[string]any{"size": size}
	if len(parts) > 1 && parts[1] != "" {
		low, high, ok := strings.Cut(parts[1], "-")
		a, err1 := strconv.ParseInt(low, 10, 64)
		b, err2 := strconv.ParseInt(high, 10, 64)
		if !ok || err1 != nil || err2 != nil {
			return nil, bad
		}
		w["range"] = []int64{a, b}
	}
	if len(parts) > 2 && parts[2] != "" {
		w["strategy"] = parts[2]
	}
	if len(parts) > 3 {
		seed, err := strconv.ParseInt(parts[3], 10, 64)
		if err != nil || seed < 0 {
			return nil, bad
		}
		w["seed"] = seed
	}
	return w, nil
}

// windowText is the inverse of parseWindow, for a window with a seed of its own.
func windowText(value any) string {
	w, _ := value.(map[string]any)
	between, strategy := "", ""
	if r, ok := w["range"].([]any); ok && len(r) == 2 {
		between = fmt.Sprintf("%v-%v", r[0], r[1])
	}
	if s, ok := w["strategy"].(string); ok {
		strategy = s
	}
	return fmt.Sprintf("%v:%s:%s:%v", w["size"], between, strategy, w["seed"])
}

// parseLogits reads the value of --logits, FORM[:K or IDS][:DTYPE][:KIND], as the field of a prompt. The error shows
// the form.
func parseLogits(s string) (any, error) {
	bad := fmt.Errorf("%q; must be none, topk, topk:20, ids:3,7 or full, and may end with :F16 or another dtype, "+
		":processed and :answers=0,2", s)
	parts := strings.Split(s, ":")
	out := map[string]any{"form": parts[0]}
	if !slices.Contains(schemas.LogitsForms, parts[0]) {
		return nil, bad
	}
	for i, part := range parts[1:] {
		switch {
		case parts[0] == schemas.LogitsNone: // no logits, so no options
			return nil, bad
		case slices.Contains(schemas.LatentsDTypes, part):
			out["dtype"] = part
		case slices.Contains(schemas.LogitsKinds, part):
			out["kind"] = part
		case strings.HasPrefix(part, "answers="):
			answers, err := parseIntegers(strings.TrimPrefix(part, "answers="))
			if err != nil {
				return nil, bad
			}
			out["answers"] = answers
		case i == 0 && parts[0] == schemas.LogitsTopK:
			k, err := strconv.ParseInt(part, 10, 64)
			if err != nil {
				return nil, bad
			}
			out["k"] = k
		case i == 0 && parts[0] == schemas.LogitsIDs:
			ids, err := parseIntegers(part)
			if err != nil {
				return nil, bad
			}
			out["ids"] = ids
		default:
			return nil, bad
		}
	}
	return out, nil
}

// parseIntegers reads integers separated by commas.
func parseIntegers(s string) (list []int64, err error) {
	for part := range strings.SplitSeq(s, ",") {
		n, err := strconv.ParseInt(strings.TrimSpace(part), 10, 64)
		if err != nil {
			return nil, err
		}
		list = append(list, n)
	}
	return list, nil
}

// milliseconds reads a duration, and returns milliseconds.
func milliseconds(s string) (any, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d != d.Truncate(time.Millisecond) {
		return nil, fmt.Errorf("%q; must be a duration such as 30s or 500ms", s)
	}
	return d.Milliseconds(), nil
}

// parseParams reads parameters of an interaction, NAME=VALUE,..., each name once. The error shows the form.
func parseParams(s string) (any, error) {
	out := map[string]any{}
	for part := range strings.SplitSeq(s, ",") {
		name, value, ok := strings.Cut(part, "=")
		if _, twice := out[name]; !ok || name == "" || twice {
			return nil, fmt.Errorf("%q; must be NAME=VALUE, each name once, with commas between them", s)
		}
		out[name] = value
	}
	return out, nil
}

// messagesOf returns the messages of --messages (nil without the flag), and the texts of the prompts: with a
// conversation its last message. Prompts beside --messages are an error.
func (p *promptFlags) messagesOf(texts []string) ([]any, []string, error) {
	if p.messages == "" {
		return nil, texts, nil
	}
	if len(texts) > 0 || p.File != "" {
		return nil, nil, errors.New("--messages: given; must be the only prompt: leave out the others, and --prompts")
	}
	list, err := readMessages(p.messages)
	if err != nil {
		return nil, nil, err
	}
	last, _ := list[len(list)-1].(map[string]any)["content"].(string)
	return list, []string{last}, nil
}

// setTextOfMessages makes the last message the text of a prompt that has messages of its own; the text names the prompt
// in tables.
func (q *prompt) setTextOfMessages() {
	list, ok := q.body["messages"].([]any)
	if !ok || len(list) == 0 {
		return
	}
	if last, ok := list[len(list)-1].(map[string]any); ok && q.text == "" {
		q.text, _ = last["content"].(string)
	}
	if q.body["prompt"] == nil {
		q.body["prompt"] = ""
	}
}

// useMessages has the whole conversation of a record sent to a language model, with the system's message, not its
// last message alone. It fails for prompts with substitutes, which have no messages.
func (q *prompt) useMessages() error {
	if q.messages == nil {
		return nil
	}
	if q.body["substitutes"] != nil {
		return errors.New("--refill-fresh: given; must be absent where prompts of a language model have system " +
			"messages, which substitutes cannot have")
	}
	if metadata, ok := q.body["metadata"].(map[string]any); ok {
		delete(metadata, dataset.System+"prompt") // it is in the messages now
	}
	list := make([]any, len(q.messages))
	for i, v := range q.messages {
		m := maps.Clone(v.(map[string]any))
		if list[i] = m; m["role"] == schemas.RoleUser {
			m["content"] = q.text // as the template makes it
		}
	}
	q.body["messages"], q.body["prompt"], q.messages = list, "", nil
	return nil
}

// maxMessages bounds the file of a conversation, in bytes.
const maxMessages = 4 << 20

// readMessages reads the file of --messages: a list of messages, or an object with one under "messages". An error names
// the message and what it must be.
func readMessages(path string) ([]any, error) {
	info, err := os.Stat(path)
	if err == nil && info.Size() > maxMessages {
		err = fmt.Errorf("%s: %d bytes; must be at most %d", path, info.Size(), maxMessages)
	}
	if err != nil {
		return nil, fmt.Errorf("--messages: %w", err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--messages: %w", err)
	}
	if i := invalidUTF8(data); i >= 0 {
		return nil, fmt.Errorf("--messages: %s: byte %d; must be UTF-8", path, i)
	}
	v, err := dataset.ParseJSON(data)
	if err != nil {
		return nil, fmt.Errorf("--messages: %s: %w", path, err)
	}
	if object, ok := v.(map[string]any); ok {
		v = object["messages"]
		for name := range object {
			if _, list := v.([]any); list && name != "messages" {
				return nil, fmt.Errorf("--messages: %s: %s: given; must be absent: nothing but messages is shown to "+
					"the model", path, name)
			}
		}
	}
	list, ok := v.([]any)
	if !ok {
		return nil, fmt.Errorf(`--messages: %s: must be a JSON list of {"role", "content"}, or an object with it under `+
			`"messages"`, path)
	}
	out := []any{}
	for i, item := range list {
		m, _ := item.(map[string]any)
		role, ok := m["role"].(string)
		if !ok {
			return nil, fmt.Errorf(`--messages: %s: message %d; must have a "role" and a "content", both texts`, path,
				i)
		}
		content, err := dataset.MessageText(fmt.Sprintf("message %d", i), m)
		if err != nil {
			return nil, fmt.Errorf("--messages: %s: %w", path, err)
		}
		out = append(out, map[string]any{"role": role, "content": content})
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("--messages: %s: no messages; must be at least one", path)
	}
	return out, nil
}

// invalidUTF8 returns the index of the first byte that is not part of valid UTF-8; -1 if there is none.
func invalidUTF8(data []byte) int {
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
	return -1
}
