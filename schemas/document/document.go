// Package document generates the documents of the contract from its Go types: JSON
// Schemas, the AsyncAPI document, a page of all events, types for TypeScript, and the tables in schemas/README.md.
// Everything that they say about a field comes from its tags and its comment in package schemas.
package document

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// Files returns every generated file by its name; dir is the folder of package schemas.
func Files(dir string) (map[string][]byte, error) {
	c, err := ReadComments(dir + "/*.go")
	if err != nil {
		return nil, err
	}
	files, err := jsonSchemas(c)
	if err != nil {
		return nil, err
	}
	if files["asyncapi.yaml"], err = asyncAPI(); err != nil {
		return nil, err
	}
	if files[typeScriptFile], err = typeScript(c); err != nil {
		return nil, err
	}
	if files[pythonFile], err = contractForms(); err != nil {
		return nil, err
	}
	files[pythonVersion] = versionOfPython()
	if files[pythonFieldsFile], err = pythonFields(c); err != nil {
		return nil, err
	}
	if files[pythonContract], err = pythonEvents(c); err != nil {
		return nil, err
	}
	if files[goPromptFile], err = goPrompt(c); err != nil {
		return nil, err
	}
	if files["EVENTS.md"], err = eventsPage(c); err != nil {
		return nil, err
	}
	files["README.md"], err = readme(filepath.Join(dir, "README.md"), c)
	return files, err
}

// readme returns the file at path with its tables of fields replaced: those between the comments
// <!-- fields NAME --> and <!-- /fields NAME -->.
func readme(path string, c *Comments) ([]byte, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	text := string(data)
	for _, t := range []reflect.Type{
		reflect.TypeFor[schemas.Prompt](), reflect.TypeFor[schemas.Text](), reflect.TypeFor[schemas.Logits](),
		reflect.TypeFor[schemas.Interaction](), reflect.TypeFor[schemas.Rollout](),
		reflect.TypeFor[schemas.SDEWindow](),
		reflect.TypeFor[schemas.Start](), reflect.TypeFor[schemas.Data](), reflect.TypeFor[schemas.Stop](),
		reflect.TypeFor[schemas.Tree](), reflect.TypeFor[schemas.BranchPoint](), reflect.TypeFor[schemas.Prune](),
		reflect.TypeFor[schemas.ScheduledSampling](), reflect.TypeFor[schemas.ProbabilityRamp](),
		reflect.TypeFor[schemas.ReflexFlow](), reflect.TypeFor[schemas.RewardSpec](),
		reflect.TypeFor[schemas.AdvantageSpec](),
		reflect.TypeFor[schemas.GroupPolicy](), reflect.TypeFor[schemas.BatchSpec](),
		reflect.TypeFor[schemas.RuleSpec](),
	} {
		table, err := Table(t, c)
		if err != nil {
			return nil, err
		}
		begin, end := "<!-- fields "+t.Name()+" -->\n", "<!-- /fields "+t.Name()+" -->\n"
		head, rest, begins := strings.Cut(text, begin)
		_, tail, ends := strings.Cut(rest, end)
		if !begins || !ends {
			return nil, fmt.Errorf("%s: no part between %s and %s", path, strings.TrimSpace(begin),
				strings.TrimSpace(end))
		}
		text = head + begin + table + end + tail
	}
	return []byte(text), nil
}

// Table returns a Markdown table of the fields of a struct: name, flag of the command, legal
// values, default, description.
func Table(t reflect.Type, c *Comments) (string, error) {
	var s strings.Builder
	s.WriteString("| field | flag | values | default | |\n|---|---|---|---|---|\n")
	for _, f := range schemas.Fields(t) {
		if f.Name == "v" {
			continue
		}
		text := c.text(t, f)
		if text == "" {
			return "", undescribed(f)
		}
		flag, def := "", f.Absent
		if f.Flag != "" {
			flag = "`--" + f.Flag + "`"
		}
		if f.Default != "" {
			def = "`" + f.Default + "`"
		}
		fmt.Fprintf(&s, "| `%s` | %s | %s | %s | %s |\n", f.Name, flag, values(f), def,
			strings.ReplaceAll(f.Phrase(text), "|", "\\|"))
	}
	return s.String(), nil
}

// values returns the legal values of a field in a few words.
func values(f schemas.Field) string {
	kind := f.Type
	if kind.Kind() == reflect.Pointer {
		kind = kind.Elem()
	}
	list := ""
	if kind.Kind() == reflect.Slice && kind.Elem().Kind() != reflect.Uint8 {
		list, kind = "list of ", kind.Elem()
	}
	var s string
	switch {
	case kind == reflect.TypeFor[schemas.Truth]():
		return "any value of JSON"
	case f.Enum != nil:
		s = "`" + strings.Join(f.Enum, "`, `") + "`"
	case f.Form != "":
		s = strings.ReplaceAll(f.Form, "_", " ")
	case kind.Kind() >= reflect.Int && kind.Kind() <= reflect.Uint64:
		s = "integer"
	case kind.Kind() == reflect.Float64 || kind.Kind() == reflect.Float32:
		s = "number"
	case kind.Kind() == reflect.Slice && kind != reflect.TypeFor[schemas.Metadata]():
		s = "bytes"
	case kind.Kind() == reflect.String:
		s = "text"
	case kind.Kind() == reflect.Bool:
		s = "true or false"
	default:
		s = "map"
	}
	if f.Range != nil {
		s += " " + interval(f.Range)
		if f.Range.Null {
			s += " or NaN"
		}
	}
	if f.Unit != "" {
		s += ", " + f.Unit
	}
	if list == "" && f.Size != nil && kind.Kind() == reflect.String {
		s += ", " + interval(f.Size) + " bytes"
	}
	return list + s
}

// interval formats a range: "1 to 8", "in (0, 1]", or "≥ 0" without an upper end.
func interval(r *schemas.Range) string {
	low, high := strconv.FormatFloat(r.Low, 'g', 6, 64), strconv.FormatFloat(r.High, 'g', 6, 64)
	if r.High == math.Trunc(r.High) && !math.IsInf(r.High, 0) {
		high = strconv.FormatFloat(r.High, 'f', -1, 64)
	}
	if r.Low == math.Trunc(r.Low) && !math.IsInf(r.Low, 0) {
		low = strconv.FormatFloat(r.Low, 'f', -1, 64)
	}
	switch {
	case math.IsInf(r.High, 1):
		return "≥ " + low
	case math.IsInf(r.Low, -1):
		return "≤ " + high
	case r.OpenLow:
		return "in (" + low + ", " + high + "]"
	case r.OpenHigh:
		return "in [" + low + ", " + high + ")"
	}
	return low + " to " + high
}
