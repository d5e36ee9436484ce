"""Where records come from: files, folders, dataset_info.json, hub data sets; and how their bytes become records."""
