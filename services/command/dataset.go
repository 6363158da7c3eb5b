package command

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/pflag"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/internal/present"
)

// prompt is one prompt as a map with the wire names of its fields. It is sent as it is: intake, not the command line,
// decides what is valid, so that all clients get the same errors.
type prompt struct {
	uid  schemas.UID
	text string
	body map[string]any
	// messages is a conversation that ends with the text. It is sent only to a language model; which kind of model it
	// is, is not known yet.
	messages []any
	// truth is a ground truth for the model's reward functions, which are not known yet; nil: none.
	truth any
	// files are those of conditions, which are stored before the prompt is sent; nil: there are none.
	files *conditionFiles
}

// datasetFlags are the flags that select prompts.
type datasetFlags struct {
	File     string `key:"prompts" flag:"prompts,f" help:"file of prompts, - for stdin: text (one per line), CSV, TSV, Parquet, JSON lines or a JSON array; records of meander, verl (messages, reward_model) or geneval (metadata); or one of the Hugging Face Hub, hf://datasets/ORG/NAME/FILE. 'meander prompts FILE' shows how it is read"`
	Format   string `key:"prompts_format" help:"format of that file: auto (from its name and content), text, csv, tsv, parquet, json, or JSON of one kind: meander, metadata, verl"`
	Column   string `key:"prompt_column" help:"column or field of that file that holds the prompt, e.g. caption"`
	Template string `key:"template" help:"text of each prompt, made from its record, e.g. 'a red sign that says \"{prompt}\"'; {prompt}, {ground_truth}, {negative_prompt}, {uid}, {seed}, {index} and metadata"`
	SkipBad  bool   `key:"skip_bad" help:"skip and list bad records; without it the first one is an error"`
	Shuffle  int64  `key:"shuffle" help:"shuffle with this seed; default the order of the file"`
	Shard    string `key:"shard" help:"I/N: use part I (from 0) of N: every N-th prompt, or batch. Uids do not depend on the part, seeds neither with the same --run or --seed"`
	DryRun   bool   `key:"dry_run" help:"print the estimate, and do nothing"`
	Overfill bool   `key:"overfill" help:"start although the estimate does not fit the streams; new events wait while a stream is full"`
	choice   dataset.Choice

	loaded loaded
	// names are the flags of a prompt's fields, for error messages.
	names fieldFlags
	// source is the address with the commit of a file of the Hugging Face Hub; empty: the file is another.
	source string
	// anyName takes names that look misspelt as metadata.
	anyName bool
}

// loaded says what happened to the records, for the estimate.
type loaded struct {
	dataset.Report
	reader *dataset.Reader // nil without a file
	// batches are the sizes of this shard's batches, in groups; nil: every group is alone.
	batches []int
}

// bind returns the flags, with their defaults.
func (d *datasetFlags) bind() *fields.Set {
	d.Format, d.Column = string(dataset.Auto), "prompt"
	return fields.Bind("", d)
}

// addFlags adds the flags of data sets to f.
func (d *datasetFlags) addFlags(f *pflag.FlagSet) {
	set := d.bind()
	set.Register(f, "prompts", "prompts_format", "prompt_column", "template", "skip_bad", "shuffle")
	f.IntVar(&d.choice.Offset, "offset", 0, "skip this many prompts, after shuffling")
	f.IntVar(&d.choice.Limit, "limit", 0, "use at most this many prompts; 0: all")
	set.Register(f)
}

// checkAllFlags joins what is wrong with the flags, whose fields are given.
func (p *promptFlags) checkAllFlags(rewards []any, fields map[string]any) error {
	alone := maps.Clone(fields)
	alone["prompt"] = "-"
	delete(alone, "reward") // what they need depends on the prompt
	names := p.names
	names.alone = true
	_, err := checkPrompt(alone, names)
	return errors.Join(err, p.checkTruthUsed(rewards, fields), p.checkRewardBy(), p.checkScheduledFlags())
}

// checkPrompt refuses what intake would refuse of a prompt whatever serves it, in the words of the flags. It returns
// the prompt.
func checkPrompt(body map[string]any, names fieldFlags) (*schemas.Prompt, error) {
	body = maps.Clone(body)
	if body["uid"] == nil {
		delete(body, "uid") // one is made later
	}
	if body["batch"] == nil {
		body["batch"] = map[string]any{"id": "-", "groups": int64(1)} // it is joined later, where one is needed
	}
	data, err := prompt{body: body}.encode()
	if err != nil {
		return nil, err
	}
	e, _, err := intake.Read(data)
	if err == nil {
		err = intake.Check(e, intake.Origin{})
	}
	if err != nil {
		return nil, errors.New(names.nameFlags(strings.TrimPrefix(err.Error(), "decode "+schemas.TypePrompt+": ")))
	}
	return e, nil
}

// promptOf returns the prompt of a record, with what the flags say of all.
func (p *promptFlags) promptOf(r *dataset.Record, defaults map[string]any) prompt {
	q := prompt{body: merged(r.Fields, defaults), truth: p.truthOf(r), messages: r.Messages, files: &p.read}
	q.text, _ = r.Prompt()
	if p.conversation != nil {
		q.body["messages"], q.body["prompt"] = p.conversation, ""
	}
	q.setTextOfMessages()
	if q.body["reward"] != nil {
		q.setGroundTruth(q.truth)
		q.truth = nil
	}
	return q
}

func wordsOf[S ~string](list []S) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return out
}

// choiceFlags are the flags of a dataset.Choice, by the words of its errors.
var choiceFlags = fieldFlags{set: map[string]string{
	"offset": "offset", "limit": "limit", "batch size": "batch-size", "batches": "batches", "shard": "shard",
	"spares": "refill-rounds",
}}

// choiceOf returns which records the flags choose: order, part and batches. An error names the flag.
func (p *promptFlags) choiceOf() (dataset.Choice, error) {
	c := p.choice
	if p.set("shuffle") {
		c.Shuffle = &p.Shuffle
	}
	var err error
	if c.Spares, err = p.spareCount(); err != nil {
		return c, err
	}
	if p.Shard == "" {
		return c, nil
	}
	i, n, ok := strings.Cut(p.Shard, "/")
	var err1, err2 error
	c.Shard, err1 = strconv.Atoi(i)
	c.Shards, err2 = strconv.Atoi(n)
	if !ok || err1 != nil || err2 != nil || c.Shards < 1 || c.Shard < 0 || c.Shard >= c.Shards {
		return c, fmt.Errorf("--shard: %q; must be I/N with I from 0 to N-1, e.g. 0/4", p.Shard)
	}
	return c, nil
}

// prepare returns what is done with each record: the template is applied, and the prompt that it becomes with the flags
// is checked.
func (p *promptFlags) prepare(specs []any, defaults map[string]any) (func(*dataset.Record) error, error) {
	var template *dataset.Template
	if p.Template != "" {
		var err error
		if template, err = dataset.ParseTemplate(p.Template); err != nil {
			return nil, fmt.Errorf("--%w", err)
		}
	}
	dir := ""
	if p.File != "-" {
		dir = filepath.Dir(p.File)
	}
	return func(r *dataset.Record) error {
		if err := p.read.prepare(r, dir); err != nil {
			return err
		}
		if template != nil {
			if err := template.Apply(r); err != nil {
				return err
			}
		}
		specs, err := p.by.of(r, specs)
		if err != nil {
			return err
		}
		if r.Fields["reward"] == nil && p.by.field != "" {
			r.Fields["reward"] = specs
		}
		_, err = checkPrompt(p.promptOf(r, defaults).body, p.names)
		return err
	}, nil
}

// givenRecords returns the prompts of the command line as records. An error names the prompt.
func (p *promptFlags) givenRecords(texts []string, prepare func(*dataset.Record) error) ([]dataset.Record, error) {
	var out []dataset.Record
	captions := p.images != nil && p.images.groups != nil // images need no caption
	for i, text := range texts {
		if strings.TrimSpace(text) == "" && !captions {
			return nil, fmt.Errorf("prompt %d: %q; must be a text", i+1, text)
		}
		r := dataset.Record{Index: i, Fields: map[string]any{"prompt": text}}
		if err := prepare(&r); err != nil {
			return nil, fmt.Errorf("prompt %d, %q: %w", i+1, present.Cut(text, 60), err)
		}
		out = append(out, r)
	}
	return out, nil
}

// truthOf returns the ground truth of a record, else that of the flags; nil if there is none.
func (p *promptFlags) truthOf(r *dataset.Record) any {
	if r.GroundTruth == nil && p.groundTruth != "" {
		return p.groundTruth
	}
	return r.GroundTruth
}

// openFile opens the file of --prompts; nil without one. done closes it.
func (d *datasetFlags) openFile(
	stdin io.Reader, prepare func(*dataset.Record) error,
) (reader *dataset.Reader, done func(), err error) {
	if d.File == "" {
		return nil, func() {}, nil
	}
	in, name, done := stdin, "stdin", func() {}
	if d.File != "-" {
		if in, done, err = openInput(d.File); err != nil {
			return nil, nil, err
		}
		name = d.fileName()
	}
	o := dataset.Options{
		Format: dataset.Format(d.Format), Fields: fieldKinds(), PromptColumn: d.Column, Misspelt: misspelt,
		Prepare: func(r *dataset.Record) error {
			if err := schemas.NameFields(promptType, r.Fields); err != nil {
				return err
			}
			return prepare(r)
		},
		SkipBad: d.SkipBad,
	}
	if d.anyName {
		o.Misspelt = nil
	}
	if reader, err = dataset.Open(in, name, o); err != nil {
		done()
		return nil, nil, err
	}
	return reader, done, nil
}

func (d *datasetFlags) fileName() string { return cmp.Or(d.source, d.File) }

// promptType is the type of a prompt.
var promptType = reflect.TypeFor[schemas.Prompt]()

// fieldKinds returns the fields of a prompt, by all of their names, with what they hold, for the cells of tables.
func fieldKinds() map[string]dataset.Kind {
	kinds := map[string]dataset.Kind{}
	for _, f := range schemas.Fields(promptType) {
		t := f.Type
		if t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		kind := dataset.KindJSON
		switch t.Kind() {
		case reflect.String:
			kind = dataset.KindText
		case reflect.Int64:
			kind = dataset.KindInteger
		case reflect.Float64:
			kind = dataset.KindNumber
		case reflect.Bool:
			kind = dataset.KindBool
		}
		for _, name := range append(f.Aliases(), f.Name) {
			kinds[name] = kind
		}
	}
	return kinds
}

// openInput opens an input file; done closes it. Opening a pipe that no program writes to would wait for ever: it is
// refused.
func openInput(name string) (in io.Reader, done func(), err error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && info.IsDir() {
		_ = f.Close()
		return nil, nil, fmt.Errorf("%s: a folder; must be a file", name)
	}
	if err == nil && info.Mode()&os.ModeNamedPipe != 0 {
		r := bufio.NewReader(f)
		if _, err := r.Peek(1); errors.Is(err, io.EOF) {
			_ = f.Close() // it was only read
			return nil, nil,
				fmt.Errorf("%s: a pipe without a writer; must be a file, or a pipe that a program writes to", name)
		}
		return r, func() { _ = f.Close() }, nil
	}
	return f, func() { _ = f.Close() }, nil
}

// misspelt returns the field of a prompt that a name in a file was probably meant for; "" for metadata. Metadata may
// have any name, so a field must be very near.
func misspelt(name string) string {
	fields := append(schemas.FieldNames(&schemas.Prompt{}), "ground_truth")
	if _, known := schemas.FieldCalled(promptType, name); known || name == "ground_truth" {
		return ""
	}
	if f, known := schemas.FieldCalled(reflect.TypeFor[schemas.Rollout](), name); known {
		return "rollout." + f.Name
	}
	if outer, _, dotted := strings.Cut(name, "."); dotted && slices.Contains(fields, outer) {
		return outer + ", which holds an object in JSON"
	}
	return schemas.NearestWithin(min(2, len(name)/3), name, fields)
}

// joins reports whether prompts are joined to batches.
func (p *promptFlags) joins(needed bool) bool {
	return p.choice.BatchSize > 0 || p.batch != "" || needed
}

// joinToBatch joins prompts to a batch if the flags or the estimator (needed) ask for one. The batch's name depends
// on its prompts: the same selection gives the same batches, another one gives others. An error says which flags do
// not fit together.
func (p *promptFlags) joinToBatch(prompts []prompt, batch dataset.Batch, needed bool) error {
	single := p.choice.BatchSize == 0
	if !p.joins(needed) {
		if len(p.place.GivenValues()) > 0 {
			return errors.New("--step, --epoch: are for batches; join the prompts with --batch-size or --batch-id")
		}
		return nil
	}
	id := p.batch
	switch {
	case single && p.Shard != "":
		return errors.New("--shard: a batch must not be split; give the size of batches with --batch-size")
	case single && id == "":
		id = "all"
	case !single:
		h := sha256.New()
		for _, q := range prompts {
			fmt.Fprintf(h, "%s %s\n", q.uid, q.text)
		}
		if id == "" {
			id = "b"
		}
		id = fmt.Sprintf("%s-%04d-%s", id, batch.Number, hex.EncodeToString(h.Sum(nil)[:4]))
	}
	if len(prompts) > schemas.MaxBatchGroups {
		return fmt.Errorf("--batch-size: %d prompts in one batch; must be at most %d", len(prompts),
			schemas.MaxBatchGroups)
	}
	spec := p.place.GivenValues()
	spec["id"], spec["groups"] = id, int64(len(prompts))
	if first, ok := spec["step"].(int64); ok {
		spec["step"] = first + int64(batch.Number)
	}
	if first, _ := spec["epoch"].(int64); p.choice.Batches > 0 {
		spec["epoch"] = first + int64(batch.Records[0].Epoch)
	}
	for _, q := range prompts {
		if q.body["batch"] == nil {
			q.body["batch"] = spec
		}
	}
	p.loaded.batches = append(p.loaded.batches, len(prompts))
	return nil
}

// encode returns the msgpack bytes of the prompt, as intake gets it. Map keys are sorted, so equal prompts have equal
// bytes.
func (p prompt) encode() ([]byte, error) {
	var buf bytes.Buffer
	enc := msgpack.NewEncoder(&buf)
	enc.SetSortMapKeys(true)
	enc.UseCompactInts(true)
	if err := enc.Encode(p.body); err != nil {
		return nil, fmt.Errorf("encode prompt %q: %w", p.uid, err)
	}
	return buf.Bytes(), nil
}

// slug returns the first words of a prompt in the alphabet of tokens, for a readable uid.
func slug(text string) string {
	words := strings.FieldsFunc(strings.ToLower(text), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	})
	s := strings.Join(words[:min(len(words), 6)], "-")
	if len(s) > 40 {
		s = strings.TrimRight(s[:40], "-")
	}
	if s == "" {
		s = "prompt"
	}
	return s
}
