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
	delete(of, "model") // a flag of its own: the checkpoint, where the field names the lane
	root.SetGlobalNormalizationFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		name = strings.ReplaceAll(name, "_", "-")
		return pflag.NormalizedName(cmp.Or(of[name], name))
	})
}
