package boot

import (
	"fmt"
	"io"
	"reflect"
	"strings"

	"github.com/spf13/pflag"
	yaml "go.yaml.in/yaml/v3"

	"github.com/meander-rl/meander/pkg/bus"
)

// Print writes the struct cfg as YAML that --config reads back, for --print-config: fields in declaration order, each
// with its help as a comment, secrets as "***". It fails if cfg is no configuration, or w fails.
func Print(w io.Writer, cfg any) error {
	v := reflect.ValueOf(cfg)
	fields, err := fieldsOf(v.Type(), "")
	if err != nil {
		return err
	}
	root := &yaml.Node{Kind: yaml.MappingNode}
	sections := map[string]*yaml.Node{"": root}
	for _, f := range fields {
		section, key := root, f.path
		if last := strings.LastIndexByte(f.path, '.'); last >= 0 {
			section, key = sectionNode(sections, f.path[:last]), f.path[last+1:]
		}
		name := &yaml.Node{Kind: yaml.ScalarNode, Value: key, HeadComment: f.help}
		section.Content = append(section.Content, name, valueNode(f, f.get(v)))
	}
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	if err := enc.Encode(root); err != nil {
		return fmt.Errorf("print config: %w", err)
	}
	return enc.Close()
}

// PrintWanted reports whether --print-config was given.
func PrintWanted(fs *pflag.FlagSet) bool {
	wanted, err := fs.GetBool(flagPrintConfig)
	return err == nil && wanted
}

// sectionNode returns the YAML node of the section at path. At first use it makes the node, with those of the sections
// around it.
func sectionNode(sections map[string]*yaml.Node, path string) *yaml.Node {
	if n, ok := sections[path]; ok {
		return n
	}
	parent, key := "", path
	if last := strings.LastIndexByte(path, '.'); last >= 0 {
		parent, key = path[:last], path[last+1:]
	}
	n := &yaml.Node{Kind: yaml.MappingNode}
	up := sectionNode(sections, parent)
	up.Content = append(up.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: key}, n)
	sections[path] = n
	return n
}

// valueNode returns the YAML node of a setting's value; a secret is masked.
func valueNode(f *field, v reflect.Value) *yaml.Node {
	if f.secret {
		text := ""
		if f.text(v) != "" {
			text = secretMask
		}
		return textNode(text)
	}
	if !f.list() {
		return scalarNode(v)
	}
	n := &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
	for i := range v.Len() {
		n.Content = append(n.Content, scalarNode(v.Index(i)))
	}
	return n
}

// scalarNode returns the YAML node of one value; URLs lose their credentials.
func scalarNode(v reflect.Value) *yaml.Node {
	if v.Kind() == reflect.String {
		return textNode(redact(v.String()))
	}
	return &yaml.Node{Kind: yaml.ScalarNode, Value: valueText(v)}
}

// textNode returns the YAML node of a text. It is quoted where YAML would read the plain text as something else
// ("no", "1e3").
func textNode(s string) *yaml.Node {
	n := &yaml.Node{}
	n.SetString(s)
	if n.Style == 0 && n.Tag == "!!str" {
		n.Style = yaml.DoubleQuotedStyle
	}
	return n
}

// redact hides the credentials of a URL.
func redact(s string) string {
	if !strings.Contains(s, "://") {
		return s
	}
	return bus.RedactURL(s)
}
