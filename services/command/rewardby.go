package command

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/dataset"
)

// rewardBy chooses the reward functions of a record by the value of one of its fields, as verl does by data_source.
type rewardBy struct {
	field string
	// specs are the functions of each value.
	specs map[string][]any
}

// addFlag adds the flag to f.
func (b *rewardBy) addFlag(f *pflag.FlagSet) {
	f.StringVar(&b.field, "reward-by", "",
		"field of the records, such as data_source or extra_info.kind, whose value chooses the reward functions: then "+
			"--reward takes VALUE=NAME[=WEIGHT], and functions without a VALUE are for all")
}

// cut takes VALUE= from the text of a function, VALUE=NAME[=WEIGHT]; "": the function is for all. A weight is a
// number, which no name is.
func (b *rewardBy) cut(text string) (value, function string) {
	name := text
	if at := strings.LastIndexByte(text, '='); at >= 0 {
		if _, err := strconv.ParseFloat(text[at+1:], 64); err == nil {
			name = text[:at]
		}
	}
	if at := strings.LastIndexByte(name, '='); b.field != "" && at >= 0 {
		return text[:at], text[at+1:]
	}
	return "", text
}

// checkRewardBy returns an error if there is nothing to choose from or by.
func (p *promptFlags) checkRewardBy() error {
	switch by := &p.by; {
	case by.field == "":
		return nil
	case p.file == "":
		return fmt.Errorf("--reward-by: %q; must be with --prompts: a prompt of the command line has no record",
			by.field)
	case len(by.specs) == 0:
		return fmt.Errorf("--reward-by: %q; must be with functions of values, such as --reward gsm8k=numeric_match",
			by.field)
	case p.refillFresh:
		return errors.New("--refill-fresh: given; must be absent with --reward-by: another prompt may want another " +
			"function")
	}
	return nil
}

// of returns the functions of a record, those for all first. A value that no flag names is an error.
func (b *rewardBy) of(r *dataset.Record, all []any) ([]any, error) {
	if b.field == "" || r.Fields["reward"] != nil {
		return all, nil
	}
	metadata, _ := r.Fields["metadata"].(map[string]any)
	field := b.field
	v, there := metadata[field]
	for _, outer := range []string{"extra_info.", "metadata."} { // what is in these is metadata itself
		if inner, inside := strings.CutPrefix(field, outer); inside && !there {
			field = inner
			v, there = metadata[field]
		}
	}
	for rest, in := field, metadata; !there; {
		outer, inner, nested := strings.Cut(rest, ".")
		if in, _ = in[outer].(map[string]any); !nested || in == nil {
			break
		}
		v, there = in[inner]
		rest = inner
	}
	value := fmt.Sprint(v)
	switch v.(type) {
	case nil:
		value = "absent"
	case []any, map[string]any:
		value = "a list or an object"
	default:
		if specs := b.specs[value]; specs != nil {
			return slices.Concat(all, specs), nil
		}
		value = strconv.Quote(value)
	}
	return nil, fmt.Errorf("%s: %s; must be one of %s, which --reward names, or name its own with --reward VALUE=NAME",
		b.field, value, strings.Join(sortedKeys(b.specs), ", "))
}
