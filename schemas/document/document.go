// Package document makes the documents of the contract from its Go types: what stands on
// a field of a struct of package schemas, its tags and its comment, is all that they say
// of it.
package document

// Files is every generated file by its name; dir is the folder of package schemas.
func Files(dir string) (map[string][]byte, error) {
	c, err := ReadComments(dir + "/*.go")
	if err != nil {
		return nil, err
	}
	files, err := jsonSchemas(c)
	if err != nil {
		return nil, err
	}
	files["asyncapi.yaml"], err = asyncAPI()
	return files, err
}
