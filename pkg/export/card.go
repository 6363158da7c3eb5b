package export

import (
	"fmt"
	"strings"

	"github.com/meander-rl/meander/pkg/view"
)

// CardFile is the name of the card in a data set of the Hugging Face Hub.
const CardFile = "README.md"

// Card returns the card of a dataset that goes to the Hugging Face Hub: what it is, for the Hub, and what its samples
// were made with, for people. version is that of the program; s may be nil.
func Card(x *Index, s *view.Settings, version string) string {
	t, b := x.Totals(), &strings.Builder{}
	fmt.Fprintf(b, "---\npretty_name: meander run %s\ntags:\n- meander\n- reinforcement-learning\n- rollouts\n", x.Run)
	if source := settingOf(s, "source"); source != "" {
		name, _, _ := strings.Cut(source, "@")
		fmt.Fprintf(b, "base_model: %s\n", name)
	}
	if x.Format == "parquet" {
		b.WriteString("configs:\n- config_name: default\n  data_files: \"*.parquet\"\n")
	}
	fmt.Fprintf(b, "---\n\n# Run %s\n\nRollouts with rewards and advantages, made by "+
		"[meander](https://github.com/meander-rl/meander) %s: %d samples in %d groups, as %s.\n", x.Run, version,
		t.Samples, t.Groups, x.Format)
	if t.LeftOut > 0 {
		fmt.Fprintf(b, "%d samples of these groups are left out: they did not complete, or are no longer stored.\n",
			t.LeftOut)
	}
	if s == nil {
		return b.String()
	}
	part := ""
	for _, x := range s.List {
		if x.Part != part {
			part = x.Part
			fmt.Fprintf(b, "\n## %s\n\n| setting | value |\n|---|---|\n", part)
		}
		fmt.Fprintf(b, "| %s | %s |\n", x.Name, cell(x.Value))
	}
	if s.Again != nil && s.Again.Command != "" {
		fmt.Fprintf(b, "\n## Again\n\n```sh\n%s\n```\n", strings.TrimSpace(s.Again.Command))
	}
	return b.String()
}

// settingOf returns the value of a setting that all samples have; empty: there is none.
func settingOf(s *view.Settings, name string) string {
	if s != nil {
		for _, x := range s.List {
			if x.Name == name && !x.Varies {
				return x.Value
			}
		}
	}
	return ""
}

// cell is a text as one cell of a table.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "\n", " ", "<", "&lt;").Replace(text)
}
