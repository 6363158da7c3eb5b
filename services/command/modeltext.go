package command

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/services/internal/present"
	textengine "github.com/meander-rl/meander/services/sampler/engine/texts"
)

// languageInfo prints the description of a language model.
func languageInfo(c *cobra.Command, dir string, family lm.Family, asJSON bool) error {
	info, err := family.Inspect(dir)
	if err != nil {
		return usage(err)
	}
	info.Parts, info.EOS, info.Problems = list(info.Parts), list(info.EOS), list(info.Problems)
	info.Reward, info.Notes = list(info.Reward), list(info.Notes)
	fields := struct {
		*lm.Info
		Loads bool `json:"loads"`
	}{info, len(info.Problems) == 0}
	return showInfo(c, asJSON, info.Problems, fields, func() { printLanguage(c.OutOrStdout(), dir, info) })
}

// printLanguage prints the description of a language model.
func printLanguage(out io.Writer, dir string, info *lm.Info) {
	printParts(out, info.Name, info.Family, dir, info.Source, info.Parts)
	if info.Vocabulary == 0 {
		return // the problems say why
	}
	line := func(format string, args ...any) { present.Linef(out, format, args...) }
	for _, part := range info.Parts {
		line("in memory as float32; %s where files have bf16, on x86-64 processors and GPUs that compute in it",
			present.Size(part.FactorBytes))
	}
	p := textengine.PolicyOf(info.Card).Text
	fmt.Fprintln(out)
	line("vocabulary %s, of which the tokenizer knows %s; context %s tokens", present.Thousands(info.Vocabulary),
		present.Thousands(info.Tokens), present.Thousands(info.MaxPositions))
	if info.Template != "" {
		line("template %s", info.Template)
	}
	line("defaults max_new_tokens %d, temperature %g, top_k %d, top_p %g, min_p %g; an answer ends with one of the "+
		"tokens %v", p.MaxNewTokens, p.Temperature, p.TopK, p.TopP, p.MinP, info.EOS)
	line("cache %s a token; %s, the default, holds %s tokens of all samples that are under way",
		present.Size(info.CacheTokenBytes), present.Size(info.CacheBytes), present.Thousands(info.CacheTokens))
	perToken := func(bytes int) string { return present.Size(bytes * info.Vocabulary) }
	line("logits of a token, --logits full: %s in F32, %s in F16 or BF16", perToken(4), perToken(2))
	printReward(out, info.Reward)
	for _, note := range info.Notes {
		line("note: %s", note)
	}
}
