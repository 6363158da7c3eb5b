package command

import (
	"cmp"
	"reflect"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/schemas"
)

// nameFields lets flags of fields be given by the names of their fields, too: --num-inference-steps and
// --num_inference_steps for --steps. A name that a flag has of its own, or that several fields have, is no other's.
func nameFields(root *cobra.Command) {
	of := map[string]string{}
	for _, t := range []reflect.Type{
		reflect.TypeFor[schemas.Prompt](), reflect.TypeFor[schemas.Rollout](), reflect.TypeFor[schemas.Text](),
	} {
		for _, f := range schemas.Fields(t) {
			if name := strings.ReplaceAll(f.Name, "_", "-"); f.Flag != "" && name != f.Flag {
				of[name] = f.Flag
			}
		}
	}
	var forget func(c *cobra.Command)
	forget = func(c *cobra.Command) {
		c.Flags().VisitAll(func(f *pflag.Flag) { delete(of, f.Name) })
		for _, sub := range c.Commands() {
			forget(sub)
		}
	}
	forget(root)
	root.SetGlobalNormalizationFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		name = strings.ReplaceAll(name, "_", "-")
		return pflag.NormalizedName(cmp.Or(of[name], name))
	})
}
