package command

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// maxInside is how many bytes of prompts a command has inside; more are in a file.
const maxInside = 8 << 10

// again says how to publish the prompts of a run again. What all have in common is said by flags, as the tags of the
// fields name them, and the rest as JSON, as files of prompts have it. The command is read back before it is shown.
func again(run schemas.Run, prompts []view.Given, whole bool) *view.Again {
	x := &view.Again{Notes: []string{}}
	note := func(format string, args ...any) { x.Notes = append(x.Notes, fmt.Sprintf(format, args...)) }
	bodies, err := bodiesOf(prompts)
	if err != nil {
		note("It cannot be made again from here: %v.", err)
		return x
	}
	name := string(run) + "-again"
	if slices.ContainsFunc(prompts, func(p view.Given) bool { return p.Seed == nil }) {
		name = string(run)
		note("The name of the run seeds the noise of prompts without a seed. So the command has the same name: give " +
			"it a store of its own, --store DIR, or it goes on with this run.")
	}
	if lane := prompts[0].Model; lane != "" {
		note("The samples are the same where the lane %s has the checkpoint and the weights that are named here. "+
			"Without a running pipeline add --model, the folder of the checkpoint.", lane)
	}
	if slices.ContainsFunc(prompts, func(p view.Given) bool { return p.Deadline != nil }) {
		note("Deadlines are left out: they are over.")
	}
	same := bodies[0]
	for _, b := range bodies { // also itself: so it is a copy, out of which what flags say is taken
		same = common(same, b)
	}
	if !whole || len(jsonLines(bodies)) > maxInside {
		file := string(run) + ".jsonl"
		get := fmt.Sprintf("meander runs prompts %s > %s", run, file)
		x.Command = fmt.Sprintf("%s\nmeander run --run %s --prompts %s", get, name, file)
		x.Python = fmt.Sprintf("# %s\nimport json, meander\n\n", get) +
			pythonCall(name, fmt.Sprintf("map(json.loads, open(%q, encoding=\"utf-8\"))", file), nil)
		return x
	}
	shared := maps.Clone(bodies[0])
	maps.DeleteFunc(shared, func(k string, v any) bool {
		differs := func(b map[string]any) bool { return !reflect.DeepEqual(b[k], v) }
		return k == "uid" || k == "prompt" || slices.ContainsFunc(bodies, differs)
	})
	own := make([]any, len(bodies))
	for i, b := range bodies {
		own[i] = without(b, shared)
	}
	x.Python = "import meander\n\n" + pythonCall(name, pythonText(own), shared)
	rest := make([]map[string]any, len(bodies))
	for i, b := range bodies {
		rest[i] = without(b, same)
	}
	args := fieldsOfPrompt().Args(same)
	for i := range rest {
		rest[i] = merged(rest[i], same)
	}
	lines := jsonLines(rest)
	command := "meander run --run " + name
	for _, arg := range args {
		command += " " + present.ShellWord(arg)
	}
	x.Command = command + " --prompts - <<'END'\n" + lines + "END"
	if err := readsBack(args, lines, prompts); err != nil {
		note("The command is not all of it: %v.", err)
	}
	return x
}

// bodiesOf returns the fields of prompts, each with its uid, without what depends on the time.
func bodiesOf(prompts []view.Given) ([]map[string]any, error) {
	bodies := make([]map[string]any, len(prompts))
	for i, p := range prompts {
		v, err := dataset.ParseJSON(p.JSON)
		body, ok := v.(map[string]any)
		if err != nil || !ok {
			return nil, cmp.Or(err, fmt.Errorf("prompt %s is no object", p.UID))
		}
		delete(body, "v")
		delete(body, "deadline")
		maps.DeleteFunc(body, func(_ string, v any) bool { return v == nil })
		body["uid"] = string(p.UID)
		bodies[i] = body
	}
	return bodies, nil
}

// common returns what two maps have in common, also in maps that both have.
func common(a, b map[string]any) map[string]any {
	out := map[string]any{}
	for k, v := range a {
		x, isMap := v.(map[string]any)
		y, too := b[k].(map[string]any)
		switch {
		case isMap && too:
			if both := common(x, y); len(both) > 0 {
				out[k] = both
			}
		case k != "uid" && k != "prompt" && reflect.DeepEqual(v, b[k]):
			out[k] = v
		}
	}
	return out
}

// without returns the fields of a map that another does not have.
func without(body, taken map[string]any) map[string]any {
	out := map[string]any{}
	for k, v := range body {
		x, isMap := v.(map[string]any)
		y, too := taken[k].(map[string]any)
		if isMap && too {
			if left := without(x, y); len(left) > 0 {
				out[k] = left
			}
		} else if _, there := taken[k]; !there {
			out[k] = v
		}
	}
	return out
}

func jsonLines(bodies []map[string]any) string {
	out := ""
	for _, b := range bodies {
		out += inJSON(b) + "\n"
	}
	return out
}

// readsBack reads the flags and lines of a command as it does, and names what differs from the prompts.
func readsBack(args []string, lines string, prompts []view.Given) error {
	var p promptFlags
	f := pflag.NewFlagSet("run", pflag.ContinueOnError)
	p.addFlags(f)
	if err := f.Parse(append(slices.Clone(args), "--prompts=-")); err != nil {
		return err
	}
	list, err := p.load(nil, strings.NewReader(lines), true)
	if err != nil {
		return err
	}
	if len(list) != len(prompts) {
		return fmt.Errorf("it has %d prompts of %d", len(list), len(prompts))
	}
	for i, q := range list {
		data, err := q.encode()
		if err != nil {
			return err
		}
		var got schemas.Prompt
		if err := schemas.Decode(data, &got); err != nil {
			return err
		}
		want := *prompts[i].Prompt
		got.Deadline, want.Deadline = nil, nil
		a, b := reflect.ValueOf(got), reflect.ValueOf(want)
		for _, field := range schemas.Fields(a.Type()) {
			if !reflect.DeepEqual(field.In(a).Interface(), field.In(b).Interface()) {
				return fmt.Errorf("%s of prompt %s is another one", field.Name, want.UID)
			}
		}
	}
	return nil
}

// pythonCall returns the loop that publishes prompts with what they share.
func pythonCall(run, prompts string, shared map[string]any) string {
	call := fmt.Sprintf("with meander.sync.connect() as client:\n    for prompt in %s:\n", prompts) +
		fmt.Sprintf("        client.publish(%q, **prompt", run)
	for _, k := range slices.Sorted(maps.Keys(shared)) {
		call += fmt.Sprintf(",\n            %s=%s", k, pythonText(shared[k]))
	}
	return call + ")\n"
}

// pythonText returns a value as Python writes it.
func pythonText(v any) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case bool:
		return map[bool]string{true: "True", false: "False"}[v]
	case []any:
		texts := make([]string, len(v))
		for i, x := range v {
			texts[i] = pythonText(x)
		}
		return "[" + strings.Join(texts, ", ") + "]"
	case map[string]any:
		var texts []string
		for _, k := range slices.Sorted(maps.Keys(v)) {
			texts = append(texts, pythonText(k)+": "+pythonText(v[k]))
		}
		return "{" + strings.Join(texts, ", ") + "}"
	}
	data, _ := json.Marshal(v) // texts and numbers of JSON
	return string(data)
}

// printSettings prints the settings of a run, and how it is made again; nil: nothing is known.
func printSettings(out io.Writer, s *view.Settings) {
	if s == nil {
		return
	}
	fmt.Fprintln(out)
	t := present.New("SETTING", "VALUE", "")
	for _, x := range s.List {
		t.Row(x.Name, x.Value, map[bool]string{true: "given"}[x.Given])
	}
	t.Print(out)
	if s.Again == nil {
		return
	}
	for _, part := range []string{s.Again.Command, s.Again.Python} {
		if part != "" {
			fmt.Fprint(out, "\n"+strings.TrimSuffix(part, "\n")+"\n")
		}
	}
	for _, n := range s.Again.Notes {
		present.Lines(out, "- "+n)
	}
}

// runsPromptsCommand makes the command 'meander runs prompts'.
func runsPromptsCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "prompts RUN", Short: "print the prompts of a run, as JSON lines that run and publish read",
		Long: `prompts prints the stored prompts of a run as they were published, one on a line, each with its uid.
Deadlines are left out.`,
		Example: "  meander runs prompts night > night.jsonl\n  meander run --run night-again --prompts night.jsonl",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			if err := schemas.CheckToken("RUN", given[0]); err != nil {
				return usage(err)
			}
			prompts, _, err := view.Prompts(c.Context(), conn.Bus, schemas.Run(given[0]), math.MaxInt)
			if err != nil {
				return err
			}
			if len(prompts) == 0 {
				return fmt.Errorf("run %q: none of its prompts are stored; they go with their groups, and a pass of "+
					"'meander rescore' has none", given[0])
			}
			bodies, err := bodiesOf(prompts)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(asIs(c.OutOrStdout()), jsonLines(bodies))
			return err
		}),
	}
}
