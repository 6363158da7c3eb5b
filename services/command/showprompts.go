package command

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/lm"
	languages "github.com/meander-rl/meander/pkg/models/lm/families"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/sampler/models"
)

// promptsShown is how many prompts and faults 'meander prompts' prints.
const promptsShown = 3

// promptsCommand makes the command 'meander prompts'.
func promptsCommand(a *app) *cobra.Command {
	var d datasetFlags
	var modelName, file string
	c := &cobra.Command{
		Use:   "prompts FILE",
		Short: "show how a file of prompts is read",
		Long: `prompts reads a file as run and publish --prompts do, and sends nothing. It prints the format, what each
column or field is taken as (the prompt, a field of the prompt, the ground truth, metadata, or not used), the first
prompts as they will be read, and the records that would be refused. With --model it counts tokens.

Exit status: 0 all records can be published, 1 some cannot.`,
		Example: `  meander prompts deploy/demo/verl-ocr.jsonl
  meander prompts train.parquet --prompt-column caption
  meander prompts prompts.jsonl --model deploy/models/signs    # which are too long for the model?
  meander prompts hf://datasets/ORG/NAME/train.parquet         # of the Hugging Face Hub
  meander prompts - --prompts-format csv < prompts.csv`,
		RunE: func(c *cobra.Command, given []string) error {
			d.File = given[0]
			if err := a.fetchPrompts(c.Context(), &d); err != nil {
				return err
			}
			return a.showPrompts(c, &d, modelName, file)
		},
	}
	d.bind().Register(c.Flags(), "prompts_format", "prompt_column")
	c.Flags().IntVar(&d.choice.Limit, "limit", 0, "read this many records, not the whole file; 0: all")
	c.Flags().StringVar(&modelName, "model", "",
		"folder or name of a model, also of the Hugging Face Hub, to say which prompts are too long for it")
	c.Flags().StringVar(&file, "out", "", "write the prompts to this file, as JSON lines that every reader takes")
	return c
}

type readPrompt struct {
	Line        int            `json:"line"`
	Fields      map[string]any `json:"fields"`
	Messages    []any          `json:"messages,omitempty"`
	GroundTruth any            `json:"ground_truth,omitempty"`
	Tokens      int            `json:"tokens,omitempty"`
}

type promptsRead struct {
	File    string                `json:"file"`
	Format  dataset.Format        `json:"format"`
	Form    string                `json:"form"`
	Prompts int                   `json:"prompts"`
	Whole   bool                  `json:"whole"` // the file was read to its end
	Refused int                   `json:"refused"`
	Reasons []string              `json:"reasons"`
	Columns []dataset.ColumnCount `json:"columns"`
	First   []readPrompt          `json:"first"`
	Tokens  *promptTokens         `json:"tokens,omitempty"`
}

type promptTokens struct {
	Model   string `json:"model"`
	Most    int    `json:"most"` // that the model takes
	Longest int    `json:"longest"`
	TooLong int    `json:"too_long"`
	// Lines are those of the first prompts that are too long.
	Lines []int `json:"lines"`

	count func(r *dataset.Record) (int, error)
}

// showPrompts reads the file and prints what it is read as. Records that would be refused, and prompts that are too
// long for the model, give exit status 1.
func (a *app) showPrompts(c *cobra.Command, d *datasetFlags, modelName, file string) (err error) {
	out := &promptsRead{File: d.fileName(), Reasons: []string{}, First: []readPrompt{}, Whole: true}
	if formats := dataset.Formats(); !slices.Contains(formats, dataset.Format(d.Format)) {
		return usage(oneOf("prompts-format", d.Format, wordsOf(formats)))
	}
	if d.choice.Limit < 0 {
		return usage(fmt.Errorf("--limit: %d; must be at least 0", d.choice.Limit))
	}
	if modelName != "" {
		if err := a.fetch(c.Context(), modelName, "", hub.Description); err != nil {
			return err
		}
		if out.Tokens, err = tokensOf(modelName); err != nil {
			return usage(fmt.Errorf("--model: %w", err))
		}
	}
	d.SkipBad = true
	reader, done, err := d.openFile(c.InOrStdin(), checkRecord)
	if err != nil {
		return usage(err)
	}
	defer done()
	write := func(*dataset.Record) error { return nil }
	if file != "" {
		f, failed := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if failed != nil {
			return usage(fmt.Errorf("--out: %w", failed))
		}
		buffer := bufio.NewWriter(f)
		defer func() { err = errors.Join(err, buffer.Flush(), f.Close()) }()
		write = func(r *dataset.Record) error {
			_, err := fmt.Fprintln(buffer, inJSON(asLine(r)))
			return err
		}
	}
	for r, err := range reader.Records() {
		if err != nil {
			return usage(err)
		}
		if err := write(&r); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
		if err := out.add(&r); err != nil {
			return usage(err)
		}
		if out.Prompts == d.choice.Limit {
			out.Whole = false
			break
		}
	}
	out.Format, out.Form, out.Columns, out.Refused = reader.Format, reader.Form, reader.Columns(), reader.Skipped
	for _, bad := range reader.Bad[:min(promptsShown, len(reader.Bad))] {
		out.Reasons = append(out.Reasons, bad.Error())
	}
	if a.json {
		err = encode(c.OutOrStdout(), out)
	} else {
		out.print(c.OutOrStdout())
	}
	if err == nil && (out.Prompts == 0 || out.Refused > 0 || out.Tokens != nil && out.Tokens.TooLong > 0) {
		return &exitError{status: exitFailed}
	}
	return err
}

// add counts a prompt, and keeps the first ones.
func (p *promptsRead) add(r *dataset.Record) (err error) {
	p.Prompts++
	n := 0
	if t := p.Tokens; t != nil {
		if n, err = t.count(r); err != nil {
			return fmt.Errorf("%s line %d: %w", p.File, r.Line, err)
		}
		if t.Longest = max(t.Longest, n); n > t.Most {
			if t.TooLong++; len(t.Lines) < promptsShown {
				t.Lines = append(t.Lines, r.Line)
			}
		}
	}
	if len(p.First) < promptsShown {
		p.First = append(p.First, readPrompt{r.Line, r.Fields, r.Messages, r.GroundTruth, n})
	}
	return nil
}

// asLine returns a record as an object that is read as the same record.
func asLine(r *dataset.Record) map[string]any {
	line := maps.Clone(r.Fields)
	if r.Messages != nil {
		line["prompt"] = r.Messages
	}
	if r.GroundTruth != nil {
		line["ground_truth"] = r.GroundTruth
	}
	return line
}

// checkRecord refuses a record that intake would refuse whatever the model is.
func checkRecord(r *dataset.Record) error {
	if _, ok := r.Fields["conditions"].(map[string]any); ok {
		c := *r
		c.Fields = maps.Clone(r.Fields)
		delete(c.Fields, "conditions") // the files are not read
		r = &c
	}
	_, err := checkPrompt((&promptFlags{}).promptOf(r, map[string]any{"v": int64(schemas.Version)}).body, fieldFlags{})
	return err
}

// tokensOf returns what counts the tokens of prompts for a model, by folder or name.
func tokensOf(name string) (*promptTokens, error) {
	info, err := families.All().Inspect(name)
	if err == nil {
		if info.CountTokens == nil {
			return nil, fmt.Errorf("%s: its tokenizer cannot be read; see 'meander model info %s'", name, name)
		}
		count := func(r *dataset.Record) (int, error) {
			text, _ := r.Prompt()
			return info.CountTokens(text)
		}
		return &promptTokens{Model: info.Name, Most: info.MaxPromptTokens, Lines: []int{}, count: count}, nil
	}
	if !errors.Is(err, model.ErrUnknown) {
		return nil, err
	}
	if _, _, found := languages.All().Find(name); found != nil {
		return nil, models.Unknown(err, found)
	}
	l, err := languages.All().Language(name)
	if err != nil {
		return nil, err
	}
	card := l.Card()
	count := func(r *dataset.Record) (int, error) {
		ids, err := l.Prompt(conversationOf(r))
		return len(ids), err
	}
	return &promptTokens{Model: card.Name, Most: card.MaxPositions, Lines: []int{}, count: count}, nil
}

// conversationOf returns what a language model is asked by a record.
func conversationOf(r *dataset.Record) []lm.Message {
	list := r.Messages
	if given, ok := r.Fields["messages"].([]any); ok {
		list = given
	}
	var out []lm.Message
	for _, v := range list {
		m := v.(map[string]any)
		out = append(out, lm.Message{Role: m["role"].(string), Content: m["content"].(string)})
	}
	if out == nil {
		text, _ := r.Prompt()
		out = []lm.Message{{Role: schemas.RoleUser, Content: text}}
	}
	return out
}

// print writes it for people.
func (p *promptsRead) print(out io.Writer) {
	present.Linef(out, "%s: %s, %s; %s%s", p.File, p.Format, p.Form, present.When(!p.Whole, "the first "),
		present.Count(p.Prompts, "prompt"))
	table := present.New("COLUMN", "RECORDS", "TAKEN AS")
	for _, column := range p.Columns {
		table.Row(cmp.Or(boot.Safe(column.Name), "(no name)"), present.Thousands(column.Records),
			column.Use+present.When(column.Note != "", ", %s", column.Note))
	}
	if len(p.Columns) > 0 {
		fmt.Fprintln(out)
		table.Print(out)
	}
	for _, r := range p.First {
		fmt.Fprintln(out)
		r.write(out)
	}
	if len(p.Reasons) > 0 {
		fmt.Fprintln(out)
		present.Linef(out, "%s would be refused; run and publish stop at the first one, or leave them out with "+
			"--skip-bad:", present.Count(p.Refused, "record"))
		for _, reason := range p.Reasons {
			present.PrintEscaped(out, "  "+reason)
		}
		if more := p.Refused - len(p.Reasons); more > 0 {
			present.Linef(out, "  and %s more", present.Thousands(more))
		}
	}
	if t := p.Tokens; t != nil {
		fmt.Fprintln(out)
		present.Linef(out, "%s takes %s tokens; the longest prompt has %s%s", t.Model, present.Thousands(t.Most),
			present.Thousands(t.Longest), present.When(t.TooLong > 0,
				"; too long: %s, the first at line %s; shorten them, or leave them out",
				present.Count(t.TooLong, "prompt"), strings.Trim(fmt.Sprint(t.Lines), "[]")))
	}
}

// write writes one prompt: its text or messages, then fields, ground truth and metadata.
func (r *readPrompt) write(out io.Writer) {
	line := func(name, text string) { present.Field(out, 16, name, present.Cut(boot.Safe(text), 600)) }
	messages := r.Messages
	if given, ok := r.Fields["messages"].([]any); ok {
		messages = given
	}
	line(fmt.Sprintf("line %d", r.Line), spaced(r.Fields["prompt"]))
	for _, v := range messages {
		if m, ok := v.(map[string]any); ok {
			line("  "+fmt.Sprint(m["role"]), spaced(m["content"]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.Fields)) {
		if name != "prompt" && name != "messages" && name != "metadata" {
			line("  field", name+" "+spaced(r.Fields[name]))
		}
	}
	if r.GroundTruth != nil {
		line("  ground truth", spaced(r.GroundTruth))
	}
	if r.Fields["metadata"] != nil {
		line("  metadata", spaced(r.Fields["metadata"]))
	}
	if r.Tokens > 0 {
		line("  tokens", present.Thousands(r.Tokens))
	}
}

// spaced returns a value as JSON on one line, with spaces where it may break.
func spaced(v any) string {
	return strings.ReplaceAll(jsonWith(" ", v), "\n", "")
}

// inJSON returns a value as JSON, on one line.
func inJSON(v any) string { return jsonWith("", v) }

// jsonWith returns a value as JSON, with line breaks that begin with a prefix; "": on one line.
func jsonWith(prefix string, v any) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent(prefix, "")
	if err := enc.Encode(v); err != nil {
		return fmt.Sprint(v)
	}
	return strings.TrimSuffix(b.String(), "\n")
}
